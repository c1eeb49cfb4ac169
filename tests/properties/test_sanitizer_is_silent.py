"""The sanitizer has nothing to say about a manager and an engine that do everything right."""

from __future__ import annotations

import pytest
import sanitized_program
from cache_machine import CacheMachine
from cache_program import CacheProgram
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from pagedkv.cache import evict


@pytest.fixture(autouse=True)
def small_pools_resist_scans_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evict, "SCAN_RESISTANT_FROM", 64)  # the program sets it; this puts it back


def test_calls_of_an_engine_that_reports_everything() -> None:
    for seed in range(150):
        sanitized_program.run_seed(seed)


@pytest.mark.deep
def test_many_calls_of_an_engine_that_reports_everything() -> None:
    for seed in range(150, 10_000):
        sanitized_program.run_seed(seed)


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.parametrize("num_blocks", [1, 4, 9, 40])
def test_random_programs_with_restored_states(num_blocks: int, block_size: int) -> None:
    """40 blocks are not checked as a whole after every call."""
    for seed in range(30, 32):
        program = CacheProgram(seed, num_blocks, block_size, sanitize=True)
        program.run(60, restarts=seed % 2 == 1)
        assert program.real.sanitizer is not None


class SanitizedMachine(CacheMachine):
    sanitize = True


def test_any_sequence_of_calls() -> None:
    run_state_machine_as_test(
        SanitizedMachine, settings=settings(max_examples=40, stateful_step_count=40)
    )


@pytest.mark.deep
def test_long_sequences_of_calls() -> None:
    run_state_machine_as_test(
        SanitizedMachine, settings=settings(max_examples=2000, stateful_step_count=100)
    )
