"""Hit rates against an independent reckoning, on invented and on real traces."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from pagedkv.errors import ConfigError
from pagedkv.simulation.prefix_cache import hit_rate
from pagedkv.simulation.trace import Trace, read_trace

BLOCK = 4


def make(prompts: list[list[int]], rest: int = 0) -> Trace:
    """Prompts of full blocks and `rest` more tokens."""
    tokens = np.array([len(ids) * BLOCK + rest for ids in prompts])
    ids = tuple(np.array(p + [10**6 + i] * bool(rest)) for i, p in enumerate(prompts))
    return Trace(None, tokens, np.ones(len(prompts), np.int64), None, BLOCK, ids)


def lru_tokens(trace: Trace, num_blocks: int) -> int:
    """Tokens found by a plain LRU list of blocks, whose chains leave from the tail."""
    assert trace.block_ids is not None
    assert trace.block_size is not None
    cached: OrderedDict[int, None] = OrderedDict()
    found = 0
    for ids, tokens in zip(trace.block_ids, trace.prompt_tokens.tolist(), strict=True):
        full = ids[: tokens // trace.block_size].tolist()
        if len(full) > num_blocks:
            continue
        hits = 0
        while hits < len(full) and full[hits] in cached:
            hits += 1
        found += hits
        for block in full:
            cached.pop(block, None)
        while len(cached) + len(full) > num_blocks:
            cached.popitem(last=False)
        for block in reversed(full):
            cached[block] = None
    return found * trace.block_size


def invented(seed: int) -> Trace:
    """A tree of prefixes with random walks from its root: ids stand for whole prefixes."""
    rng = np.random.default_rng(seed)
    names: dict[tuple[int, ...], int] = {}
    prompts = []
    for _ in range(200):
        path = tuple(rng.integers(0, 2, int(rng.integers(1, 9))).tolist())
        prompts.append([names.setdefault(path[: i + 1], len(names)) for i in range(len(path))])
    return make(prompts, rest=int(rng.integers(0, BLOCK)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_blocks", [1, 3, 8, 20, 70, 200])
def test_lru_equals_a_plain_list(seed: int, num_blocks: int) -> None:
    trace = invented(seed)
    assert hit_rate(trace, num_blocks, BLOCK, "lru").found_tokens == lru_tokens(trace, num_blocks)


def test_without_a_limit_all_that_was_there_is_found() -> None:
    trace = invented(7)
    assert hit_rate(trace, 0).found_tokens == lru_tokens(trace, 10**6)


def test_small_case_by_hand() -> None:
    result = hit_rate(make([[1, 2], [1, 2], [1, 3], [4, 5, 6], [1, 2]], rest=1), 2)
    assert (result.found_tokens, result.too_large) == ((0 + 2 + 1 + 0 + 1) * BLOCK, 1)
    assert result.token_hit_rate == result.found_tokens / (4 * 9 + 13)


def test_a_prompt_of_full_blocks_is_found_whole() -> None:
    assert hit_rate(make([[1, 2], [1, 2]]), 2).found_tokens == 2 * BLOCK


def test_what_cannot_be_counted_is_refused() -> None:
    trace = make([[1]])
    with pytest.raises(
        ConfigError, match="block_size=8: the trace's block ids are for blocks of 4"
    ):
        hit_rate(trace, 4, 8)
    with pytest.raises(ConfigError, match="num_blocks=-1"):
        hit_rate(trace, -1)
    with pytest.raises(ConfigError, match="eviction='fifo': use one of slru, lru"):
        hit_rate(trace, 4, eviction="fifo")
    bare = Trace(None, trace.prompt_tokens, trace.output_tokens, None, None, None)
    with pytest.raises(ConfigError, match="no column of block ids"):
        hit_rate(bare, 4)


@pytest.mark.skipif("PAGEDKV_TRACES" not in os.environ, reason="no traces: set PAGEDKV_TRACES")
@pytest.mark.parametrize("name", ["mooncake_conversation.csv", "agent_sessions.csv"])
@pytest.mark.parametrize("num_blocks", [1_000, 10_000])
def test_real_traces_equal_a_plain_list(name: str, num_blocks: int) -> None:
    trace = read_trace(Path(os.environ["PAGEDKV_TRACES"]) / name)
    assert hit_rate(trace, num_blocks, None, "lru").found_tokens == lru_tokens(trace, num_blocks)


@pytest.mark.skipif("PAGEDKV_TRACES" not in os.environ, reason="no traces: set PAGEDKV_TRACES")
@pytest.mark.parametrize(
    ("name", "num_blocks"),
    [
        ("mooncake_conversation.csv", 3_655),
        ("mooncake_conversation.csv", 37_000),  # where it is furthest below
        ("agent_sessions.csv", 5_476),
    ],
)
def test_resisting_scans_costs_at_most_a_point_on_real_traces(name: str, num_blocks: int) -> None:
    trace = read_trace(Path(os.environ["PAGEDKV_TRACES"]) / name)
    lru, slru = (
        hit_rate(trace, num_blocks, eviction=policy).token_hit_rate for policy in ("lru", "slru")
    )
    assert slru >= lru - 0.01
