"""Timing things in turn, so that a busy machine is so for all of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def in_turns(
    calls: Mapping[Name, Callable[[], object]],
    *,
    seconds: float = 0.0,
    rounds: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, list[float]]:
    """Seconds of each call, in rounds of all of them, after a first round that does not count.

    At least `rounds` rounds, and as many more as begin within `seconds`. clock: what a call is
    timed with; `time.thread_time` is not moved by neighbours, where one thread does the work.
    """
    for call in calls.values():
        call()  # finds cold caches
    gc.collect()
    taken: dict[Name, list[float]] = {name: [] for name in calls}
    end, done = time.perf_counter() + seconds, 0
    while done < rounds or time.perf_counter() < end:
        for name, call in calls.items():
            start = clock()
            call()
            taken[name].append(clock() - start)
        done += 1
    return taken


def fast(seconds: Sequence[float]) -> float:
    """The time that the fastest tenth kept: neighbours disturb a run in one direction."""
    return sorted(seconds)[len(seconds) // 10]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of them do not exceed; ValueError for no values."""
    if not values:
        raise ValueError("no values have no percentile")
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]
