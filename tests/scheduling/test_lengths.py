"""Quantiles of what is left, and bounds of what is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.scheduling.lengths import MAX_TENANTS, MIN_LENGTHS, WINDOW, OutputLengths


def with_lengths(lengths: list[int], tenant: str | None = None) -> OutputLengths:
    seen = OutputLengths()
    for length in lengths:
        seen.record(tenant, length)
    return seen


@pytest.mark.parametrize(
    ("generated", "quantile", "expected"),
    [(0, 0.5, 50), (0, 0.9, 90), (0, 1.0, 100), (0, 0.0, 1), (50, 0.5, 75), (98, 0.5, 99)],
)
def test_the_quantile_is_of_those_that_were_longer(
    generated: int, quantile: float, expected: int
) -> None:
    seen = with_lengths(list(range(1, 101)))
    assert seen.expected(None, generated, 1000, quantile) == expected


def test_the_cap_stands_in_where_nothing_is_known() -> None:
    seen = with_lengths([10] * (MIN_LENGTHS - 1), "a")
    assert seen.expected("a", 0, 500, 0.5) == 500
    seen.record("a", 10)
    assert seen.expected("a", 0, 500, 0.5) == 10
    assert seen.expected("a", 0, 7, 0.5) == 7
    assert seen.expected("a", 10, 500, 0.5) == 500  # none was longer
    assert seen.expected("b", 0, 500, 0.5) == 500  # another tenant


@given(
    lengths=st.lists(st.integers(0, 50), min_size=MIN_LENGTHS, max_size=60),
    generated=st.integers(0, 50),
    more=st.integers(1, 50),
    quantile=st.floats(0.01, 1.0),
)
def test_as_by_counting(lengths: list[int], generated: int, more: int, quantile: float) -> None:
    cap = generated + more
    found = with_lengths(lengths).expected(None, generated, cap, quantile)
    assert generated < found <= cap
    longer = [length for length in lengths if length > generated]
    share = [n for n in longer if sum(m <= n for m in longer) >= quantile * len(longer) - 1e-9]
    assert found == min(share, default=cap) or found == cap


def test_old_lengths_and_old_tenants_are_forgotten() -> None:
    seen = with_lengths([1000] * WINDOW + [1] * WINDOW)
    assert seen.expected(None, 0, 5000, 1.0) == 1
    for i in range(MAX_TENANTS + 10):
        seen.record(str(i), 5)
    assert len(seen._recent) == MAX_TENANTS and len(seen._sorted) <= MAX_TENANTS
    assert None not in seen._recent and None not in seen._sorted


def test_asking_for_strangers_keeps_nothing() -> None:
    seen = OutputLengths()
    for i in range(3 * MAX_TENANTS):
        seen.expected(str(i), 0, 10, 0.5)
    assert not seen._recent and not seen._sorted
