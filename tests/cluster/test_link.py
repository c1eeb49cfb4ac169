"""The front end's link, with actors that only note what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from serving import toy_core

from pagedkv.cluster import link as link_module
from pagedkv.cluster.actors import Plan
from pagedkv.cluster.link import ClusterLink
from pagedkv.cluster.router_messages import Duty
from pagedkv.cluster.worker import Started, host_id
from pagedkv.engine.facts import Facts
from pagedkv.engine.picture import take_picture
from pagedkv.engine.status import core_status
from pagedkv.engine.wire import (
    Answer,
    Ask,
    Batch,
    Complete,
    Died,
    Disown,
    FromCore,
    Move,
    MoveFailed,
    Own,
    Ready,
    ToCore,
)
from pagedkv.errors import ConfigError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Abort, Add, Delta, Drain, Resume
from pagedkv.scheduling.params import SamplingParams
from pagedkv.transfer import roles as roles_module
from pagedkv.transfer.routing import Assign, Role, RouterStats, SetRole

FACTS = Facts(SchedulerConfig(8, 16, 64), 32, 4, 32, model="one")


class Noting:
    """Actors that do nothing."""

    def __init__(self, plan: Plan, listener: Any) -> None:
        self.told: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.told.append((name, given))


def made(
    monkeypatch: pytest.MonkeyPatch,
    roles: Mapping[str, Role] | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    host: str | None = None,
    now: float = 0.0,
) -> tuple[ClusterLink, Noting]:
    """All workers are ready, and so is the router. roles: None: replicas a and b.

    host, now: of the workers.
    """
    monkeypatch.setattr(link_module, "Actors", Noting)
    roles = roles or {"a": "both", "b": "both"}
    link = ClusterLink(Plan(roles, {}), clock)
    for name in roles:
        link.up(name, Started("boot", host or host_id(), 1, "", now))
        link.came(name, Ready(FACTS))
    link.routed(True)
    actors = link._actors
    assert isinstance(actors, Noting)
    return link, actors


def request(name: str) -> Add:
    return Add(name, (1, 2, 3), SamplingParams(max_tokens=4), 0.0, 0)


def sent(actors: Noting) -> list[tuple[str, ToCore]]:
    """Messages to workers, with their names."""
    return [
        (given[0], message) for name, given in actors.told if name == "send" for message in given[1]
    ]


def duties(actors: Noting) -> dict[str, Duty]:
    """What the router was told last."""
    return dict([given[0] for name, given in actors.told if name == "assign"][-1])


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
        link.decided([Assign("r", "a", "a", 0, 0, 0.0, 0.0, 0.0)], RouterStats())
        await turn()
        assert [type(message) for _, message in sent(actors)] == [Add]

    asyncio.run(run())


def test_a_router_that_names_a_dead_worker_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router may decide before it hears of a death."""

    async def run() -> None:
        link, actors = made(monkeypatch)
        link.send(request("r"))
        await turn()
        assert link.lost("a", "ActorDiedError", "killed")
        assert duties(actors)["a"] == Duty("both", draining=False, boot=None)
        actors.told.clear()
        link.decided([Assign("r", "a", "a", 0, 0, 0.0, 0.0, 0.0)], RouterStats())
        await turn()
        assert [name for name, _ in actors.told if name != "send"] == ["wish"]
        link.up("a", Started("another", host_id(), 2, "", 0.0))
        link.came("a", Ready(FACTS))
        assert duties(actors)["a"] == Duty("both", draining=False, boot="another")

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


SPLIT: Mapping[str, Role] = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}


def test_a_decode_worker_that_is_to_prefill_gives_away_what_it_decodes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        link, actors = made(monkeypatch, SPLIT)
        link.send(request("r"))
        link.decided([Assign("r", "d1", "d1", 0, 0, 0.0, 0.0, 0.0)], RouterStats())
        link.came("d1", Batch((Delta("r@0", 0, (5,), (None,)),), None, 1))
        link.decided([SetRole("d1", "prefill")], RouterStats())
        await turn()
        assert sent(actors)[-1] == ("d1", Move("r", 1, "d0", "live"))
        assert duties(actors)["d1"] == Duty("prefill", draining=True, boot="boot")
        assert link._describe(link._seats["d1"])["state"] == "turning"
        link.came("d0", Complete("r", 1, (1,), (False,)))
        link._look_at_seats()
        await turn()
        assert ("d0", Own("r", 1)) in sent(actors)
        assert duties(actors)["d1"] == Duty("prefill", draining=False, boot="boot")
        facts = link._describe(link._seats["d1"])
        assert (facts["role"], facts["state"], facts["flips"]) == ("prefill", "ready", 1)

    asyncio.run(run())


def test_what_cannot_be_moved_keeps_no_worker_from_its_new_role_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        now = 0.0
        link, actors = made(monkeypatch, SPLIT, lambda: now)
        link.send(request("r"))
        link.decided(
            [Assign("r", "d1", "d1", 0, 0, 0.0, 0.0, 0.0), SetRole("d1", "prefill")], RouterStats()
        )
        link._look_at_seats()
        assert duties(actors)["d1"] == Duty("prefill", draining=True, boot="boot")
        now = roles_module._TURN + 1
        link._look_at_seats()
        assert duties(actors)["d1"] == Duty("prefill", draining=False, boot="boot")
        link.came("d1", Batch((Delta("r@0", 0, (5,), (None,)),), None, 1))
        link._look_at_seats()
        await turn()
        assert sent(actors)[-1] == ("d1", Move("r", 1, "d0", "live"))

    asyncio.run(run())


def test_a_prefill_worker_that_is_to_decode_takes_decodes_at_once_and_ends_its_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        link, actors = made(monkeypatch, SPLIT)
        link.send(request("r"))
        link.decided(
            [Assign("r", "p1", "d0", 0, 0, 0.0, 0.0, 0.0), SetRole("p1", "decode")], RouterStats()
        )
        await turn()
        assert [type(message) for _, message in sent(actors)] == [Add, Move]
        assert duties(actors)["p1"] == Duty("decode", draining=False, boot="boot")
        link.routed(False)
        link.routed(True)  # another router, which knows nothing
        assert duties(actors)["p1"] == Duty("decode", draining=False, boot="boot")

    asyncio.run(run())


def test_the_last_worker_of_a_role_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router may not have heard yet that the other one is gone."""

    async def run() -> None:
        link, actors = made(monkeypatch, SPLIT)
        assert link.lost("d0", "ActorDiedError", "killed")
        actors.told.clear()
        link.decided([SetRole("d1", "prefill")], RouterStats())
        assert link._seats["d1"].service.role == "decode"
        assert ("lose", ("d1",)) in actors.told  # it gave it nothing any more

    asyncio.run(run())


def test_a_worker_that_is_started_again_has_the_role_that_it_had_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        link, actors = made(monkeypatch, SPLIT)
        link.decided([SetRole("d1", "prefill")], RouterStats())
        assert link.lost("d1", "ActorDiedError", "killed")
        link._look_at_seats()
        link.up("d1", Started("another", host_id(), 2, "", 0.0))
        assert duties(actors)["d1"] == Duty("prefill", draining=False, boot=None)
        assert "d1" not in [seat.name for seat in link._seats if seat.takes_decodes]

    asyncio.run(run())


def test_a_worker_that_dies_while_it_turns_has_its_new_role_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it was giving away goes on from what was delivered, not from the copy under way."""

    async def run() -> None:
        link, actors = made(monkeypatch, SPLIT)
        link.send(request("r"))
        link.decided([Assign("r", "d1", "d1", 0, 0, 0.0, 0.0, 0.0)], RouterStats())
        link.came("d1", Batch((Delta("r@0", 0, (5,), (None,)),), None, 1))
        link.decided([SetRole("d1", "prefill")], RouterStats())
        await turn()
        assert sent(actors)[-1] == ("d1", Move("r", 1, "d0", "live"))
        assert link.lost("d1", "ActorDiedError", "killed")
        await turn()
        assert ("d0", Disown("r", 1)) in sent(actors)
        assert [given[0][0].request_id for name, given in actors.told if name == "wish"][-1] == "r"
        assert duties(actors)["d1"] == Duty("prefill", draining=False, boot=None)
        actors.told.clear()
        link.came("d0", Complete("r", 1, (1,), (False,)))  # it was on its way
        link.up("d1", Started("another", host_id(), 2, "", 0.0))
        link.came("d1", Ready(FACTS))
        link.decided([Assign("r", "d1", "d0", 0, 0, 0.0, 0.0, 0.0)], RouterStats())
        link._look_at_seats()
        await turn()
        (_, resume), (_, move) = sent(actors)
        assert isinstance(resume, Resume) and resume.outputs[0].tokens == (5,)
        assert (resume.add.request_id, move) == ("r@2", Move("r", 3, "d0", "prefilled"))
        assert link._describe(link._seats["d1"])["state"] == "ready"

    asyncio.run(run())


def test_a_worker_that_turns_gives_to_another_what_a_dead_one_was_to_get(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        link, actors = made(monkeypatch, {**SPLIT, "d2": "decode"})
        link.send(request("r"))
        link.decided([Assign("r", "d1", "d1", 0, 0, 0.0, 0.0, 0.0)], RouterStats())
        link.came("d1", Batch((Delta("r@0", 0, (5,), (None,)),), None, 1))
        link.decided([SetRole("d1", "prefill")], RouterStats())
        assert link.lost("d0", "ActorDiedError", "killed")
        link.came("d1", MoveFailed("r", 1, "worker 'd0' is gone"))
        link._look_at_seats()
        await turn()
        moves = [message for _, message in sent(actors) if isinstance(message, Move)]
        assert moves == [Move("r", 1, "d0", "live"), Move("r", 2, "d2", "live")]
        assert duties(actors)["d1"] == Duty("prefill", draining=True, boot="boot")
        link.came("d2", Complete("r", 2, (1,), (False,)))
        link._look_at_seats()
        assert duties(actors)["d1"] == Duty("prefill", draining=False, boot="boot")

    asyncio.run(run())


def test_a_worker_that_comes_back_as_another_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        link, _ = made(monkeypatch)
        assert link.lost("b", "ActorDiedError", "killed")
        link.up("b", Started("another", host_id(), 2, "", 0.0))
        with pytest.raises(
            ConfigError, match="'b' differs from worker 'b': model is 'x', not 'one'"
        ):
            link.came("b", Ready(replace(FACTS, model="x")))
        assert link._seats.ready == ["a"]
        link.came("b", Ready(FACTS))
        assert link._seats.ready == ["a", "b"]

    asyncio.run(run())


def test_what_is_missing_is_told_at_once_whoever_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def newest(link: ClusterLink) -> str | None:
        frame = None
        while not link._frames.empty():
            came = await link.receive()
            frame = frame if isinstance(came, Answer) else came
        assert isinstance(frame, Batch) and frame.status is not None
        assert frame.status.cluster is not None
        return frame.status.cluster.missing

    async def run() -> None:
        link, _ = made(monkeypatch)
        for name in "ab":
            link.came(name, Batch((), None, 0, core_status(toy_core())))
        assert await newest(link) is None
        link.routed(False)
        assert await newest(link) == "the router is not there"
        link.routed(True)
        link.send(request("r"))
        link.decided([Assign("r", "a", "a", 0, 0, 0.0, 0.0, 0.0)], RouterStats())
        assert link.lost("a", "ActorDiedError", "killed")
        assert await newest(link) is None
        assert link.lost("b", "ActorDiedError", "killed")
        assert await newest(link) == "no prefill worker is there"
        for name in "ab":
            link.up(name, Started("again", host_id(), 2, "", 0.0))
            link.came(name, Ready(FACTS))
        link.send(Ask(1, "drain", "a"))
        assert await newest(link) is None
        assert link.lost("b", "ActorDiedError", "killed")  # nobody else takes anything
        assert await newest(link) == "no prefill worker is there but one that drains"
        link.send(Ask(2, "undrain", "a"))
        assert await newest(link) is None

    asyncio.run(run())
    assert "worker a is gone: killed; it is started again, 1 requests go on" in caplog.text


def test_who_waits_for_a_worker_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no worker steps: one is full of what stands still, or none is there."""

    async def run() -> None:
        link, _ = made(monkeypatch)
        link.came("a", Batch((), None, 0, core_status(toy_core())))
        for name in "rst":
            link.send(request(name))
        drained(link)
        counts = []
        for act in (
            lambda: None,
            lambda: None,  # nothing has changed: nothing is told
            lambda: link.decided([Assign("r", "a", "a", 0, 0, 0.0, 0.0, 0.0)], RouterStats()),
            lambda: link.send(Abort("s")),
        ):
            act()
            link._tell_who_waits()
            told = [f.status for f in drained(link) if isinstance(f, Batch)]
            counts.append([s.cluster.unplaced for s in told if s is not None and s.cluster])
        assert counts == [[3], [], [2], [1]]

    asyncio.run(run())


def test_a_request_that_no_router_survives_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them is there for a moment, so that none seems to be missing for long."""

    async def run() -> None:
        link, _ = made(monkeypatch)
        link.send(request("placed"))
        link.routed(False, "an earlier fault")
        link.routed(True)
        link.decided([Assign("placed", "a", "a", 0, 0, 0.0, 0.0, 0.0)], RouterStats())
        link.send(request("r"))
        for left in (3, 2, 1, 0):
            drained(link)
            link.routed(False, "KeyError: 7")
            link.routed(True)
            ends = [d for f in drained(link) if isinstance(f, Batch) for d in f.deltas]
            assert [d.request_id for d in ends] == ([] if left else ["r"])
        assert ends[0].error == "4 routers in a row have failed, the last: KeyError: 7"

    asyncio.run(run())


def test_counts_of_routers_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        link, _ = made(monkeypatch)
        link.came("a", Batch((), None, 0, core_status(toy_core())))
        drained(link)
        link.decided([], RouterStats(names=9, assigned=3, gaps=1))
        link.routed(False)
        link.routed(True)
        link.decided([], RouterStats(names=2, assigned=1))
        told = [f.status.cluster for f in drained(link) if isinstance(f, Batch) and f.status]
        routers = [it.router for it in told if it is not None]
        assert routers[0] == RouterStats(names=9, assigned=3, gaps=1)
        assert routers[-1] == RouterStats(names=2, assigned=4, gaps=1)

    asyncio.run(run())


def test_times_of_another_host_are_moved_to_its_clock_and_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        link, actors = made(monkeypatch, host="elsewhere", now=500.0)
        link.send(replace(request("r"), arrival=3.0, deadline=9.0))
        link.decided([Assign("r", "a", "a", 0, 0, 0.0, 0.0, 0.0)], RouterStats())
        await turn()
        link.came("a", Batch((Delta("r@0", 0, (5,), (None,), admitted_at=504.0),), None, 1))
        assert link.lost("a", "ActorDiedError", "killed")
        link.decided([Assign("r", "b", "b", 0, 0, 0.0, 0.0, 0.0)], RouterStats())
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


def test_a_deadline_that_passes_while_it_waits_for_a_worker_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        now = 0.0
        link, _ = made(monkeypatch, clock=lambda: now)
        link.send(replace(request("r"), deadline=3.0))
        now = 3.1
        link._give_up_late()
        (delta,) = (d for f in drained(link) if isinstance(f, Batch) for d in f.deltas)
        assert (delta.finish_reason, delta.error_type) == ("deadline", "deadline")

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


def test_what_cannot_leave_a_worker_is_said_once_and_to_whoever_asks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        times = [0.0]
        link, actors = made(monkeypatch, clock=lambda: times[-1])
        link.send(request("r"))
        link.decided([Assign("r", "a", "a", 0, 0, 0.0, 0.0, 0.0)], RouterStats())
        link.came("a", Batch((Delta("r@0", 0, (5,), (None,)),), None, 1))
        link.send(Ask(1, "drain", "a"))
        await turn()
        assert sent(actors)[-1] == ("a", Move("r", 1, "b", "live"))
        link.came("a", MoveFailed("r", 1, "'b' gave no room"))
        for time in (0.25, 0.5, 0.75):
            times.append(time)
            link._look_at_seats()
        why = "1 of 1 could not move yet: 'b' gave no room"
        assert link._describe(link._seats["a"])["stuck"] == why
        times.append(1.0)
        link._look_at_seats()  # it is tried again
        await turn()
        assert sent(actors)[-1] == ("a", Move("r", 2, "b", "live"))
        link.came("a", MoveFailed("r", 2, "'b' gave no room"))
        link.lost("b", "ActorDiedError", "killed")
        for time in (1.25, 1.5):
            times.append(time)
            link._look_at_seats()
        assert link._describe(link._seats["a"])["stuck"] == "no other worker takes requests"
        link.send(Ask(2, "undrain", "a"))
        link._look_at_seats()
        assert link._describe(link._seats["a"])["stuck"] is None
        said = [record.getMessage() for record in caplog.records if "stay at" in record.msg]
        assert said == [
            f"requests stay at worker a: {why}",
            "requests stay at worker a: no other worker takes requests",
        ]

    asyncio.run(run())
