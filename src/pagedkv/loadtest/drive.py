"""Sending requests when they are due, whatever becomes of those before them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from pagedkv.loadtest.answer import Answer
from pagedkv.loadtest.requests import LoadRequest


class Clock(Protocol):
    """Seconds that only go forward."""

    def now(self) -> float: ...

    async def until(self, moment: float) -> None:
        """Waits until then; not at all if that has passed."""
        ...


class MonotonicClock:
    """The machine's."""

    def now(self) -> float:
        return time.monotonic()

    async def until(self, moment: float) -> None:
        delay = moment - time.monotonic()
        if delay > 0:
            await asyncio.sleep(delay)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request and what became of it; all times are on the clock of the test.

    due: when it was to be sent; released: when the generator came to it; sent: when it was sent,
    later than that only where a limit of concurrency held it back.
    """

    request: LoadRequest
    due: float
    released: float
    sent: float
    ended: float
    answer: Answer


async def drive(
    requests: Sequence[LoadRequest],
    send: Callable[[LoadRequest], Awaitable[Answer]],
    clock: Clock,
    *,
    max_concurrency: int | None = None,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Sends each request at its time and waits for all answers; outcomes in order of `requests`.

    An open loop: nobody waits for another's answer, unless max_concurrency says how many may be
    under way at once. `send` does not raise.
    """
    start = clock.now()
    gate: AbstractAsyncContextManager[object] = nullcontext()
    if max_concurrency is not None:
        gate = asyncio.Semaphore(max_concurrency)

    async def run(request: LoadRequest) -> Outcome:
        released = clock.now()
        async with gate:
            sent = clock.now()
            answer = await send(request)
        outcome = Outcome(request, start + request.due, released, sent, clock.now(), answer)
        on_end(outcome)
        return outcome

    async with asyncio.TaskGroup() as tasks:
        running = []
        for request in requests:
            await clock.until(start + request.due)
            running.append(tasks.create_task(run(request)))
    return [task.result() for task in running]


async def measure_lag(clock: Clock, lags: list[float], interval: float = 0.02) -> None:
    """Until it is cancelled, appends by how many seconds the event loop woke it too late.

    What a request waits for in the generator itself is in its latencies, too: this says how much
    that may be.
    """
    while True:
        due = clock.now() + interval
        await clock.until(due)
        lags.append(clock.now() - due)
