"""What a block size costs and saves, against sums worked out beside the code."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.errors import ConfigError
from pagedkv.simulation.block_sizes import prompts_of, shared_prefixes, tradeoffs
from pagedkv.simulation.trace import Trace

SIZES = (1, 4, 16)


def trace(ids: tuple[np.ndarray, ...] | None = None, block_size: int | None = None) -> Trace:
    return Trace(None, np.array([9, 16, 30]), np.array([3, 1, 2]), None, block_size, ids)


def test_waste_and_tables_are_sums() -> None:
    found = tradeoffs(trace(), shared_prefixes(3), SIZES, token_bytes=10)
    live = [9, 10, 11, 16, 30, 31]
    for size in SIZES:
        reserved = sum(-(-tokens // size) * size for tokens in live)
        assert found[size].tail_waste == pytest.approx(1 - sum(live) / reserved)
        entries = [-(-tokens // size) for tokens in (12, 17, 32)]
        assert found[size].table_bytes == pytest.approx(4 * sum(entries) / 3)


def test_a_copy_takes_the_filled_slots() -> None:
    found = tradeoffs(trace(), shared_prefixes(3), SIZES, token_bytes=10)
    assert found[1].copy_bytes == 0.0
    assert found[4].copy_bytes == 10 * (1 + 2) / 2  # 16 tokens end with their block
    assert found[16].copy_bytes == 10 * (9 + 14) / 2


def test_hits_are_common_tokens_or_common_blocks() -> None:
    first = np.arange(1, 31, dtype=np.int32)
    second = first.copy()
    second[21:] += 100  # 21 tokens in common
    found = tradeoffs(trace(), [first, second, first[:10]], SIZES, 10)
    # Of the last prompt one token is always left to compute.
    assert all(row.hit_rate == pytest.approx((21 + 9) / 70) for row in found.values())
    full = {size: row.full_block_hit_rate * 70 for size, row in found.items()}
    assert full == pytest.approx({1: 21 + 9, 4: 20 + 8, 16: 16})


def test_prompts_share_what_block_ids_share() -> None:
    ids = (np.array([5]), np.array([5, 7]), np.array([5, 7, 9, 11]))
    prompts = prompts_of(trace(ids, 8))
    assert [len(prompt) for prompt in prompts] == [9, 16, 30]
    assert (prompts[1] == prompts[2][:16]).all()
    assert (prompts[0][:8] == prompts[1][:8]).all() and prompts[0][8] != prompts[1][8]


def test_invented_prompts_repeat() -> None:
    first, again = shared_prefixes(20, 2), shared_prefixes(20, 2)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert len({prompt[:50].tobytes() for prompt in first}) == 2


def test_what_cannot_be_looked_up_is_refused() -> None:
    with pytest.raises(ConfigError, match="no column of block ids"):
        prompts_of(trace())
    long = Trace(None, np.array([10**7]), np.array([1]), None, 8, (np.array([1]),))
    with pytest.raises(ConfigError, match="more than 1,000,000 tokens"):
        prompts_of(long)
    with pytest.raises(ConfigError, match="block size 0"):
        tradeoffs(trace(), shared_prefixes(3), (0,), 10)
