"""Prompts that come once leave alone what is used again."""

from __future__ import annotations

import random

import pytest
from cache_helpers import remember

from pagedkv.cache import BlockManager

BLOCKS, SIZE = 128, 4
PROMPT = BLOCKS // 8 * SIZE  # an eighth of the pool, the most that the promise covers


def one_off(number: int) -> list[int]:
    return [1_000_000 + number * PROMPT + i for i in range(PROMPT)]


def hot(name: int = 0, length: int = PROMPT - 3) -> list[int]:
    return [-name * PROMPT - i - 1 for i in range(length)]


def use(m: BlockManager, tokens: list[int]) -> int:
    """Opens, computes and closes a prompt; the tokens that were found."""
    found = m.match([*tokens, 0]).cached_tokens
    remember(m, tokens)
    return found


@pytest.mark.parametrize("length", [SIZE, 5 * SIZE + 1, PROMPT - 3])
def test_a_prefix_used_by_every_tenth_request_survives_ten_pools_of_others(length: int) -> None:
    m = BlockManager(BLOCKS, SIZE)
    found = []
    for request in range(10 * BLOCKS * SIZE // PROMPT * 2):
        if request % 10 == 0:
            found.append(use(m, hot(length=length)))
        else:
            use(m, one_off(request))
    assert min(found[2:]) >= 0.95 * length
    m.check()


def test_a_new_hot_prefix_hits_from_its_third_use() -> None:
    """Evicted before its second use, it is known when it is computed again."""
    m = BlockManager(BLOCKS, SIZE)
    for request in range(200):
        use(m, one_off(request))
    found = []
    for request in range(200, 240):
        if request % 10 == 0:
            found.append(use(m, hot(7)))
        else:
            use(m, one_off(request))
    assert found[:2] == [0, 0] and min(found[2:]) >= 0.95 * len(hot(7))


def test_yesterdays_prefix_makes_room_for_todays() -> None:
    m = BlockManager(BLOCKS, SIZE)
    for name in range(12):  # together three times the protected quarter
        for _ in range(3):
            use(m, hot(name))
    assert use(m, hot(11)) >= 0.95 * len(hot())
    for request in range(40):
        use(m, one_off(request))
    assert use(m, hot(0)) == 0


def test_chains_leave_from_the_tail_in_both_rings() -> None:
    m = BlockManager(BLOCKS, SIZE)
    draw = random.Random(0)
    stems = [hot(name, draw.randrange(1, PROMPT)) for name in range(6)]
    for request in range(300):
        stem = draw.choice(stems)
        use(m, stem[: draw.randrange(len(stem))] + one_off(request)[: draw.randrange(1, 40)])
        order = m.pool.eviction.order().tolist()
        place = {block: i for i, block in enumerate(order)}
        parents = m.index.parents
        assert all(place[b] < place[parents[b]] for b in order if parents[b] in place)
    m.check()


def test_a_protected_block_that_is_held_is_not_evicted() -> None:
    m = BlockManager(BLOCKS, SIZE)
    for _ in range(3):
        use(m, hot())
    assert len(m.pool.eviction.protected)
    seq = m.open([*hot(), 0])
    held = m.block_table(seq).tolist()
    remember(m, one_off(0))
    m.evict(BLOCKS)
    m.check()
    assert m.num_cached_blocks == 0 and m.block_table(seq).tolist() == held
    assert m.match([*hot(), 0]).cached_tokens == len(hot())
    m.close(seq)
