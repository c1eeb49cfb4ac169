"""The eviction ring against a plain list."""

import random

import numpy as np

from pagedkv.cache.evict import EvictionOrder, EvictionRing


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def test_oldest_go_first_and_discarded_ones_not_at_all() -> None:
    ring = EvictionRing(5)
    ring.append(ids(3, 1, 5, 2))
    ring.discard(ids(1))
    assert ring.take(2).tolist() == [3, 5]
    assert ring.order().tolist() == [2]
    assert ring.take(9).tolist() == [2]
    assert ring.take(1).tolist() == []


def test_a_block_that_comes_back_is_the_newest() -> None:
    ring = EvictionRing(3)
    ring.append(ids(1, 2))
    ring.discard(ids(1))
    ring.append(ids(1))
    assert ring.order().tolist() == [2, 1]


def test_compaction_keeps_the_order() -> None:
    """Far more appends than the ring has places, so that it compacts many times."""
    draw, ring, plain = random.Random(0), EvictionRing(8), []
    for _ in range(3000):
        outside = [b for b in range(1, 9) if b not in plain]
        if outside and draw.random() < 0.5:
            chosen = draw.sample(outside, draw.randint(1, len(outside)))
            ring.append(ids(*chosen))
            plain += chosen
        elif plain and draw.random() < 0.7:
            chosen = draw.sample(plain, draw.randint(1, len(plain)))
            ring.discard(ids(*chosen))
            plain = [b for b in plain if b not in chosen]
        else:
            k = draw.randint(0, 4)
            assert ring.take(k).tolist() == plain[:k]
            plain = plain[k:]
        assert ring.order().tolist() == plain


def test_take_looks_past_a_long_run_of_stale_entries() -> None:
    ring = EvictionRing(200)
    ring.append(np.arange(1, 201, dtype=np.int32))
    ring.discard(np.arange(1, 199, dtype=np.int32))
    assert ring.take(2).tolist() == [199, 200]


def test_evicted_names_are_remembered_for_a_while() -> None:
    order = EvictionOrder(64)
    order.remember(list(range(200)))
    assert not order.recall(71) and order.recall(72) and order.recall(199)
    assert not order.recall(199)  # once
    order.remember([73, 500])  # seen again: young again
    order.remember(list(range(1000, 1126)))
    assert order.recall(73) and not order.recall(74)


def test_a_small_pool_remembers_and_protects_nothing() -> None:
    order = EvictionOrder(63)
    order.remember([1])
    assert not order.recall(1)
    order.hot[[2, 3]] = True
    order.append(np.array([3, 1, 2], np.int32))
    assert order.take(2).tolist() == [3, 1]


def test_the_protected_ring_is_a_quarter_and_gives_back_its_oldest() -> None:
    order = EvictionOrder(64)
    order.hot[1:41] = True
    order.append(np.arange(1, 41, dtype=np.int32))
    assert len(order.protected) == 16 and len(order.probation) == 24
    assert order.order().tolist() == list(range(1, 41))
    order.append(np.array([50], np.int32))  # cold: behind what was given back
    assert order.take(25).tolist() == [*range(1, 25), 50]
    assert order.take(99).tolist() == list(range(25, 41))
