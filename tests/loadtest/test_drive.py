"""The open loop, under a clock that moves when it is waited for."""

from __future__ import annotations

import asyncio

import pytest

from pagedkv.loadtest.answer import Answer
from pagedkv.loadtest.datasets import Question
from pagedkv.loadtest.drive import MonotonicClock, Outcome, drive, measure_lag
from pagedkv.loadtest.requests import LoadRequest


class ScriptedClock:
    """Every wait ends `lateness` seconds too late."""

    def __init__(self, start: float = 100.0, lateness: float = 0.0) -> None:
        self.time, self.lateness = start, lateness

    def now(self) -> float:
        return self.time

    async def until(self, moment: float) -> None:
        await asyncio.sleep(0)  # what was started comes first
        if moment > self.time:
            self.time = moment + self.lateness


def requests(*due: float) -> list[LoadRequest]:
    return [LoadRequest(moment, Question(str(i), 1)) for i, moment in enumerate(due)]


def test_arrivals_wait_for_no_answer() -> None:
    async def run() -> tuple[list[float], list[Outcome]]:
        clock, all_sent, sent = ScriptedClock(), asyncio.Event(), []

        async def send(request: LoadRequest) -> Answer:
            sent.append(clock.now())
            if len(sent) == 4:
                all_sent.set()
            await all_sent.wait()  # nobody is answered before everybody has asked
            clock.time += 1.0
            return Answer(text=request.question.prompt)

        outcomes = await asyncio.wait_for(drive(requests(0, 0.5, 0.5, 2), send, clock), 60)
        return sent, outcomes

    sent, outcomes = asyncio.run(run())
    assert sent == [100.0, 100.5, 100.5, 102.0]
    assert [o.answer.text for o in outcomes] == ["0", "1", "2", "3"]
    assert [o.due for o in outcomes] == [100.0, 100.5, 100.5, 102.0]
    assert sorted(o.ended for o in outcomes) == [103.0, 104.0, 105.0, 106.0]


def test_lateness_is_what_the_generator_itself_lost() -> None:
    async def run() -> list[Outcome]:
        clock = ScriptedClock(lateness=0.25)

        async def send(request: LoadRequest) -> Answer:
            return Answer()

        return await drive(requests(1, 2, 2.1), send, clock)

    outcomes = asyncio.run(run())
    late = [outcome.released - outcome.due for outcome in outcomes]
    assert late == pytest.approx([0.25, 0.25, 0.15])  # the third was due while it slept
    assert all(outcome.sent == outcome.released for outcome in outcomes)


def test_a_limit_of_concurrency_holds_back_and_says_so() -> None:
    async def run() -> tuple[int, list[Outcome], list[int]]:
        clock, under_way, most = ScriptedClock(), 0, 0
        ended: list[int] = []

        async def send(request: LoadRequest) -> Answer:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            for _ in range(20):
                await asyncio.sleep(0)
            clock.time += 1.0
            under_way -= 1
            return Answer()

        outcomes = await drive(
            requests(0, 0, 0, 0, 0),
            send,
            clock,
            max_concurrency=2,
            on_end=lambda outcome: ended.append(int(outcome.request.question.prompt)),
        )
        return most, outcomes, ended

    most, outcomes, ended = asyncio.run(run())
    assert most == 2
    assert [o.released for o in outcomes] == [100.0] * 5
    assert [o.sent for o in outcomes][:2] == [100.0, 100.0]
    assert all(o.sent > 100.0 for o in outcomes[2:])
    assert sorted(ended) == [0, 1, 2, 3, 4]


def test_lag_is_measured_until_it_is_cancelled() -> None:
    async def run() -> list[float]:
        lags: list[float] = []
        watching = asyncio.create_task(measure_lag(ScriptedClock(lateness=0.5), lags))
        while len(lags) < 3:
            await asyncio.sleep(0)
        watching.cancel()
        return lags[:3]

    assert asyncio.run(run()) == pytest.approx([0.5, 0.5, 0.5])


def test_the_machines_clock_does_not_wait_for_the_past() -> None:
    async def run() -> None:
        clock = MonotonicClock()
        await asyncio.wait_for(clock.until(clock.now() - 1.0), 60)
        moment = clock.now() + 0.001
        await asyncio.wait_for(clock.until(moment), 60)
        assert clock.now() >= moment

    asyncio.run(run())
