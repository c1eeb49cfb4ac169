"""A whole load test: send, wait, and what came of it as one result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pagedkv.loadtest import metrics
from pagedkv.loadtest.client import Target, open_client
from pagedkv.loadtest.drive import MonotonicClock, Outcome, drive, measure_lag
from pagedkv.loadtest.requests import Goals, LoadRequest

# Milliseconds at P99 above which the generator itself shows in what it measures: in when requests
# come (a burst takes it a fraction of a millisecond for each), and in when their tokens do.
_TOO_LATE, _TOO_SLOW = 100.0, 25.0


@dataclass(frozen=True, slots=True)
class LoadRun:
    """lags: seconds by which the generator's event loop was late, now and then."""

    outcomes: Sequence[Outcome]
    lags: Sequence[float]

    @property
    def duration(self) -> float:
        """Seconds from when the first request was due until the last answer ended."""
        if not self.outcomes:
            return 0.0
        return max(o.ended for o in self.outcomes) - min(o.due for o in self.outcomes)

    @property
    def start(self) -> float:
        """When the first request was due, on the clock of the outcomes."""
        return min(o.due for o in self.outcomes)

    def result(self, goals: Goals | None, percentiles: Sequence[float]) -> dict[str, Any]:
        """All figures, those of tenants and SLO classes too, as plain values."""
        facts = metrics.generator(self.outcomes, self.lags)
        return {
            "duration": self.duration,
            **metrics.figures(self.outcomes, self.duration, goals, percentiles),
            "max_concurrent_requests": metrics.most_at_once(self.outcomes),
            "failures": metrics.failures(self.outcomes),
            "generator": facts,
            "generator_kept_up": facts["p99_lateness_ms"] <= _TOO_LATE
            and facts["p99_lag_ms"] <= _TOO_SLOW,
            **metrics.groups(self.outcomes, self.duration, goals, percentiles),
        }

    def details(self) -> dict[str, list[Any]]:
        """A value for each request, beside what `result` says of all."""
        return metrics.details(self.outcomes)


async def run_load(
    requests: Sequence[LoadRequest],
    target: Target,
    *,
    max_concurrency: int | None = None,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> LoadRun:
    """Sends requests, sorted by when they are due, to a server and waits for their ends."""
    clock, lags = MonotonicClock(), list[float]()
    async with open_client(target, clock.now) as client:
        watching = asyncio.create_task(measure_lag(clock, lags))
        try:
            outcomes = await drive(
                requests, client.send, clock, max_concurrency=max_concurrency, on_end=on_end
            )
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
    return LoadRun(outcomes, lags)
