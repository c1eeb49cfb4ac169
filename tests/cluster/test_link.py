"""The front end's link, with actors that only note what they are told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pagedkv.cluster import link as link_module
from pagedkv.cluster.actors import Plan
from pagedkv.cluster.link import ClusterLink
from pagedkv.cluster.worker import Started, host_id
from pagedkv.engine.facts import Facts
from pagedkv.engine.wire import Batch, Died, Ready
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Add, Drain
from pagedkv.scheduling.params import SamplingParams
from pagedkv.transfer.routing import Assign


class Noting:
    """Actors that do nothing."""

    def __init__(self, plan: Plan, listener: Any) -> None:
        self.told: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.told.append((name, given))


def made(monkeypatch: pytest.MonkeyPatch) -> tuple[ClusterLink, Noting]:
    """Workers a and b are ready, and so is the router."""
    monkeypatch.setattr(link_module, "Actors", Noting)
    link = ClusterLink(Plan({"a": "both", "b": "both"}, {}), lambda: 0.0)
    for name in "ab":
        link.up(name, Started("boot", host_id(), 1, "", 0.0))
        link.came(name, Ready(Facts(SchedulerConfig(8, 16, 64), 32, 4, 32)))
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
