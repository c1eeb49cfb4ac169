"""The exact peak against a simulation that walks step by step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.scheduling.peak import Growth, peak_blocks

growths = st.builds(Growth, st.integers(0, 60), st.integers(0, 60), st.integers(-3, 3))


def simulated(sequences: list[Growth], block_size: int) -> int:
    """The most over all steps of what those take that have not ended."""
    return max(
        sum(s.offset + -(-(s.tokens + t) // block_size) for s in sequences if s.remaining >= t)
        for t in {s.remaining for s in sequences} | set(range(61))
        if any(s.remaining >= t for s in sequences)
    )


@settings(max_examples=300, deadline=None)
@given(sequences=st.lists(growths, min_size=1, max_size=12), block_size=st.integers(1, 17))
def test_the_peak_is_that_of_a_simulation(sequences: list[Growth], block_size: int) -> None:
    assert peak_blocks(sequences, block_size) == simulated(sequences, block_size)


def test_no_sequences_take_nothing() -> None:
    assert peak_blocks([], 16) == 0


def test_one_that_ends_makes_room_for_those_that_grow_on() -> None:
    """B=1: 10 tokens end after 1 step, 1 token grows to 8: never 18, but 11 + 2."""
    assert peak_blocks([Growth(10, 1), Growth(1, 7)], 1) == 13


def test_more_room_is_needed_in_the_middle_than_at_either_end() -> None:
    """B=1: 3 + 3 now, 5 + 5 at the end of the first, 9 at that of the second."""
    assert peak_blocks([Growth(3, 2), Growth(3, 6)], 1) == 10
