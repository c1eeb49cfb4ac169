"""The block manager does exactly what the plain reading of its contract says."""

from __future__ import annotations

import pytest
from cache_machine import CacheMachine
from cache_program import CacheProgram
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

SIZES = (1, 2, 3, 4, 16)
POOLS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("num_blocks", POOLS)
def test_random_programs_agree_with_the_reference(num_blocks: int, block_size: int) -> None:
    for seed in range(2):
        CacheProgram(seed, num_blocks, block_size).run(60, restarts=seed % 2 == 1)


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("num_blocks", (2, 3, 5, 8, 12, 16))
def test_random_programs_agree_where_scans_are_resisted(
    num_blocks: int, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedkv.cache.evict.SCAN_RESISTANT_FROM", 1)
    for seed in range(20, 23):
        CacheProgram(seed, num_blocks, block_size).run(70, restarts=seed % 2 == 1)


@pytest.mark.parametrize("block_size", SIZES)
def test_random_programs_agree_without_prefix_caching(block_size: int) -> None:
    CacheProgram(7, 6, block_size, prefix_caching=False).run(60, restarts=False)


@pytest.mark.deep
@pytest.mark.parametrize("block_size", SIZES)
def test_long_random_programs_agree_with_the_reference(block_size: int) -> None:
    for seed in range(100, 160):
        CacheProgram(seed, 1 + seed % 16, block_size).run(400, restarts=seed % 2 == 1)


@pytest.mark.parametrize("resistant", [False, True])
def test_any_sequence_of_calls_agrees_with_the_reference(
    resistant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if resistant:
        monkeypatch.setattr("pagedkv.cache.evict.SCAN_RESISTANT_FROM", 1)
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=100, stateful_step_count=40)
    )


@pytest.mark.deep
def test_long_sequences_of_calls_agree_with_the_reference() -> None:
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=3000, stateful_step_count=100)
    )
