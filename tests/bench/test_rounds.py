"""What counts of several rounds, and of several values."""

from __future__ import annotations

import pytest

from pagedkv.bench.rounds import fast, in_turns, percentile


def test_calls_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    taken = in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2)
    assert "".join(calls) == "ab" * 3
    assert {name: len(seconds) for name, seconds in taken.items()} == {"a": 2, "b": 2}


def test_calls_are_timed_with_the_clock() -> None:
    now = 0.0

    def work() -> None:
        nonlocal now
        now += 2.0

    assert in_turns({"a": work}, rounds=3, clock=lambda: now) == {"a": [2.0, 2.0, 2.0]}


def test_the_fastest_tenth_keeps_its_slowest() -> None:
    assert fast([float(i) for i in reversed(range(20))]) == 2.0
    assert fast([3.0, 1.0]) == 1.0


@pytest.mark.parametrize(("percent", "value"), [(50, 50), (90, 90), (99, 99), (100, 100), (0, 1)])
def test_percentiles_are_values(percent: float, value: float) -> None:
    assert percentile([float(i) for i in range(100, 0, -1)], percent) == value


def test_percentiles_of_few_values() -> None:
    assert percentile([2.0, 1.0, 3.0], 50) == 2.0
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
