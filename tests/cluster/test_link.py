"""The front end's link, with actors that only note what they are told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from serving import toy_core

from pagedkv.cluster import link as link_module
from pagedkv.cluster.actors import Plan
from pagedkv.cluster.link import ClusterLink
from pagedkv.cluster.worker import Started, host_id
from pagedkv.engine.facts import Facts
from pagedkv.engine.picture import take_picture
from pagedkv.engine.wire import Answer, Ask, Batch, Died, FromCore, Ready
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Add, Delta, Drain, Resume
from pagedkv.scheduling.params import SamplingParams
from pagedkv.transfer.routing import Assign

FACTS = Facts(SchedulerConfig(8, 16, 64), 32, 4, 32, model="one")


class Noting:
    """Actors that do nothing."""

    def __init__(self, plan: Plan, listener: Any) -> None:
        self.told: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.told.append((name, given))


def made(
    monkeypatch: pytest.MonkeyPatch, host: str | None = None, now: float = 0.0
) -> tuple[ClusterLink, Noting]:
    """Workers a and b are ready, and so is the router. host, now: of the workers."""
    monkeypatch.setattr(link_module, "Actors", Noting)
    link = ClusterLink(Plan({"a": "both", "b": "both"}, {}), lambda: 0.0)
    for name in "ab":
        link.up(name, Started("boot", host or host_id(), 1, "", now))
        link.came(name, Ready(FACTS))
    link.routed(True)
    actors = link._actors
    assert isinstance(actors, Noting)
    return link, actors


def request(name: str) -> Add:
    return Add(name, (1, 2, 3), SamplingParams(max_tokens=4), 0.0, 0)


async def turn() -> None:
    """What was put off until the loop's next turn is done."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def test_a_server_that_drains_still_places_what_it_has_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that was told to drain would refuse what is placed, moved or resumed there."""

    async def run() -> None:
        link, actors = made(monkeypatch)
        link.send(request("r"))
        link.send(Drain())
        link.decided([Assign("r", "a", "a", 0, 0, 0.0, 0.0, 0.0)])
        await turn()
        sent = [message for name, given in actors.told if name == "send" for message in given[1]]
        assert [type(message) for message in sent] == [Add]

    asyncio.run(run())


def test_a_router_that_names_a_dead_worker_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last report of a worker may come to the router behind the news of its death."""

    async def run() -> None:
        link, actors = made(monkeypatch)
        link.send(request("r"))
        await turn()
        assert link.lost("a", "ActorDiedError", "killed")
        actors.told.clear()
        link.decided([Assign("r", "a", "a", 0, 0, 0.0, 0.0, 0.0)])
        await turn()
        assert [name for name, _ in actors.told if name != "send"] == ["lose", "wish"]

    asyncio.run(run())


def test_a_fault_of_what_follows_an_actor_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever waits for that actor would wait for ever."""

    async def run() -> None:
        link, _ = made(monkeypatch)
        link.broken(KeyError("a fault of the program"))
        frames = []
        while not frames or not isinstance(frames[-1], Died):
            frames.append(await link.receive())
        assert any(isinstance(frame, (Ready, Batch)) for frame in frames)

    asyncio.run(run())


def test_times_of_another_host_are_moved_to_its_clock_and_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        link, actors = made(monkeypatch, host="elsewhere", now=500.0)
        link.send(replace(request("r"), arrival=3.0, deadline=9.0))
        link.decided([Assign("r", "a", "a", 0, 0, 0.0, 0.0, 0.0)])
        await turn()
        link.came("a", Batch((Delta("r@0", 0, (5,), (None,), admitted_at=504.0),), None, 1))
        assert link.lost("a", "ActorDiedError", "killed")
        link.decided([Assign("r", "b", "b", 0, 0, 0.0, 0.0, 0.0)])
        link.send(Ask(1, "pool"))
        await turn()
        add, resume = (
            message
            for name, given in actors.told
            if name == "send"
            for message in given[1]
            if isinstance(message, (Add, Resume))
        )
        assert (add.arrival, add.deadline) == (503.0, 509.0)
        assert (resume.add.arrival, resume.add.deadline) == (503.0, 509.0)
        assert (resume.admitted_at, resume.first_token_at) == (504.0, 500.0)
        picture = take_picture(toy_core(num_blocks=4))
        picture["decisions"] = [{"now": 502.0, "words": "so"}]
        link.came("b", Answer(0, picture))
        frames = drained(link)
        deltas = [delta for frame in frames if isinstance(frame, Batch) for delta in frame.deltas]
        assert [delta.admitted_at for delta in deltas] == [4.0]
        (answer,) = (frame for frame in frames if isinstance(frame, Answer))
        assert answer.value["decisions"] == [{"now": 2.0, "words": "b: so"}]

    asyncio.run(run())


def test_a_worker_that_comes_back_with_another_model_gets_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        link, _ = made(monkeypatch)
        assert link.lost("a", "ActorDiedError", "killed")
        link.up("a", Started("another", host_id(), 2, "", 0.0))
        link.came("a", Ready(replace(FACTS, model="another")))
        assert link._ready() == ["b"]
        assert "'b' and 'a' differ in model: 'one' and 'another'" in caplog.text
        link.came("a", Ready(FACTS))
        assert link._ready() == ["a", "b"]

    asyncio.run(run())


def test_a_request_that_nobody_can_take_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        link, _ = made(monkeypatch)
        now = [0.0]
        link._clock = lambda: now[0]
        link.routed(False)
        link.send(request("r"))
        now[0] = link_module.PATIENCE - 1
        link._give_up_late()
        assert not [f for f in drained(link) if isinstance(f, Batch) and f.deltas]
        now[0] += 2
        link._give_up_late()
        (delta,) = (d for f in drained(link) if isinstance(f, Batch) for d in f.deltas)
        assert delta.finish_reason == "error" and "the router is not there" in str(delta.error)

    asyncio.run(run())


def drained(link: ClusterLink) -> list[FromCore]:
    return [link._frames.get_nowait() for _ in range(link._frames.qsize())]


def test_a_clock_is_known_by_what_came_least_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first word of a worker may have been under way for long."""
    link, _ = made(monkeypatch, host="elsewhere", now=500.0)
    now = [0.5]
    link._clock = lambda: now[0]
    link.shows("a", 503.5)
    assert link._seats["a"].offset == 503.0
    now[0] = 1.5
    link.shows("a", 504.0)  # late
    assert link._seats["a"].offset == pytest.approx(503.0, abs=0.01)
    now[0] = 101.5
    link.shows("a", 604.499)  # its clock is slower than ours
    assert link._seats["a"].offset == pytest.approx(502.999, abs=0.001)
