"""Sorted runs of keys against a plain sorted list, through many splits and empty runs."""

import random
from bisect import bisect_left, insort

from pagedkv.cache.sorted_keys import SortedKeys


def test_agrees_with_a_sorted_list() -> None:
    draw, keys, plain = random.Random(1), SortedKeys(), []
    for step in range(6000):
        grow = step % 3000 < 2000  # up to well over two runs, then down again
        if grow or not plain:
            key = draw.randbytes(draw.randint(1, 3))
            if key not in plain[bisect_left(plain, key) : bisect_left(plain, key) + 1]:
                keys.add(key)
                insort(plain, key)
        else:
            keys.remove(plain.pop(draw.randrange(min(len(plain), 700))))
        probe = draw.randbytes(draw.randint(1, 3))
        at = bisect_left(plain, probe)
        assert keys.below(probe) == (plain[at - 1] if at else b"")
        assert keys.at_or_above(probe) == (plain[at] if at < len(plain) else b"")
        if step % 100 == 0:
            assert list(keys) == plain
            prefix = probe[:1]
            assert keys.starting_with(prefix) == [k for k in plain if k.startswith(prefix)]
    assert len(keys._runs) > 1, "the test never split a run"


def test_emptying_and_refilling() -> None:
    keys = SortedKeys()
    for round_ in range(2):
        for i in range(1200):
            keys.add(i.to_bytes(2))
        for i in range(1200):
            keys.remove(i.to_bytes(2))
        assert list(keys) == [], f"round {round_}"
        assert keys.below(b"\xff") == keys.at_or_above(b"\x00") == b""
