"""The actor that routes, without Ray."""

from __future__ import annotations

import asyncio
import itertools
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from pagedkv.cluster import in_order
from pagedkv.cluster.actors import Actors, Plan
from pagedkv.cluster.router_actor import RouterActor
from pagedkv.cluster.router_messages import Duty, Turn, Wish, make_wish
from pagedkv.errors import PagedKVError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.tenants import Tenant
from pagedkv.transfer.events import AllBlocksCleared, KVEventBatch
from pagedkv.transfer.routing import (
    Assign,
    FlipConfig,
    RouterConfig,
    RouterStats,
    SetRole,
    WorkerReport,
)

CONFIG = RouterConfig(4, 1)
BOOT = "boot"


def report(name: str, free: int = 100, **given: Any) -> WorkerReport:
    return WorkerReport(name, "both", 100, free, 1000.0, **given)


def wish(name: str) -> Wish:
    return Wish(name, np.arange(8, dtype="<i4").tobytes(), 8)


class Router(RouterActor):
    """Whose calls are numbered here, and come in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = (Turn(1, number) for number in itertools.count())

    async def told(self, what: str, it: Any) -> None:
        await getattr(self, what)(next(self.turns), it)


async def begun(duties: dict[str, Duty], config: RouterConfig = CONFIG) -> Router:
    actor = Router()
    await actor.begin(1, config, {})
    await actor.told("assign", duties)
    for name in duties:
        await actor.observe(BOOT, report(name), [])
    return actor


async def decisions(actor: RouterActor) -> list[Any]:
    """Those that come next."""
    decided: list[Any] = []
    while not decided:
        decided, _ = await actor.decide()
    return decided


def test_what_a_worker_is_for_is_what_the_front_end_says() -> None:
    async def run() -> None:
        actor = await begun({"a": Duty("prefill", False, BOOT), "b": Duty("decode", False, BOOT)})
        await actor.observe(BOOT, report("unknown"), [])
        await actor.told("arrive", [wish("r")])
        [decision] = await decisions(actor)
        assert isinstance(decision, Assign)
        assert (decision.prefill, decision.decode) == ("a", "b")
        await actor.told(
            "assign", {"a": Duty("decode", False, BOOT), "b": Duty("prefill", False, BOOT)}
        )
        await actor.told("arrive", [wish("s")])
        [decision] = await decisions(actor)
        assert isinstance(decision, Assign)
        assert (decision.prefill, decision.decode) == ("b", "a")

    asyncio.run(run())


def test_a_side_that_starves_gets_a_worker_of_the_other() -> None:
    async def run() -> None:
        flip = FlipConfig(patience_s=1e-6, rest_s=1e6)
        prefills = {f"p{i}": Duty("prefill", False, BOOT) for i in range(2)}
        duties = {**prefills, "d": Duty("decode", False, BOOT)}
        actor = await begun(duties, RouterConfig(4, 1, flip=flip))
        await actor.observe(BOOT, report("d", free=0), [])
        await actor.told("arrive", [wish("r")])  # waits: it has no room to decode
        [decision] = await decisions(actor)
        assert isinstance(decision, SetRole) and decision.role == "decode"
        assert decision.worker in prefills
        await actor.told("assign", {**duties, decision.worker: Duty("decode", False, BOOT)})
        [placed] = await decisions(actor)
        assert isinstance(placed, Assign) and placed.decode == decision.worker

    asyncio.run(run())


def test_counts_are_told_though_nothing_is_decided() -> None:
    asked: list[str] = []
    tell_all = SimpleNamespace(remote=lambda: asked.append("a"))

    async def run() -> None:
        actor = Router()
        await actor.begin(1, CONFIG, {"a": SimpleNamespace(tell_all=tell_all)})
        await actor.told("assign", {"a": Duty("both", False, BOOT)})
        await actor.observe(BOOT, report("a"), [])
        assert await actor.decide() == ([], RouterStats(workers=1))
        for seq, events in ((0, [AllBlocksCleared()]), (2, [])):
            batch = msgspec.msgpack.encode(KVEventBatch(0.0, [*events]))
            await actor.observe(BOOT, report("a"), [(seq, batch)])
        assert await actor.decide() == ([], RouterStats(workers=1, gaps=1))
        assert asked == ["a"]

    asyncio.run(run())


def test_a_process_that_is_gone_is_not_heard_any_more() -> None:
    async def run() -> None:
        actor = await begun({"a": Duty("both", False, BOOT), "b": Duty("both", False, BOOT)})
        assert await actor.decide() == ([], RouterStats(workers=2))
        for boot in (None, "again"):
            await actor.told(
                "assign", {"a": Duty("both", False, boot), "b": Duty("both", True, BOOT)}
            )
            await actor.observe(BOOT, report("a"), [])
            assert actor._router.stats() == RouterStats(workers=1)
        await actor.observe("again", report("a"), [])
        await actor.told("arrive", [wish("r")])
        [decision] = await decisions(actor)
        assert decision.prefill == "a" and actor._router.stats().workers == 2

    asyncio.run(run())


def test_an_error_of_any_call_comes_to_whoever_waits_for_decisions() -> None:
    """Nobody looks at what becomes of a report."""

    async def run() -> None:
        actor = await begun({"a": Duty("both", False, BOOT)})
        await actor.observe(BOOT, report("a"), [(0, b"no events")])
        with pytest.raises(msgspec.DecodeError):
            await actor.decide()
        await actor.told("arrive", [wish("r")])  # it has no router any more
        await actor.begin(2, CONFIG, {})
        await actor.observe(BOOT, report("a"), [])
        await actor.arrive(Turn(2, 0), [wish("r")])
        assert len(await decisions(actor)) == 1

    asyncio.run(run())


@pytest.mark.parametrize(("policy", "turn"), [("fair", ("a", 2.0)), ("fcfs", (None, 1.0))])
def test_a_wish_says_whose_turn_counts_where_the_policy_is_fair(policy, turn) -> None:
    config = SchedulerConfig(4, 64, 128, policy=policy, tenants=(("a", Tenant(weight=2.0)),))
    add = Add("r", (1, 2, 3), SamplingParams(max_tokens=4), arrival=0.0, seed=0, tenant="a")
    got = make_wish(add, (), config, 0.0)
    assert (got.tenant, got.weight) == turn


@pytest.mark.parametrize(("drawn", "room"), [((), 40), ((7,) * 39, 1), ((7,) * 40, 1)])
def test_a_wish_asks_for_room_for_what_is_still_to_be_drawn(drawn, room) -> None:
    config = SchedulerConfig(4, 64, 128)
    add = Add("r", (1, 2, 3), SamplingParams(n=2, max_tokens=40), arrival=0.0, seed=0)
    assert make_wish(add, drawn, config, 0.0).output_tokens == 2 * room


def test_a_wish_asks_for_no_more_room_than_a_sequence_may_have() -> None:
    add = Add("r", (1,) * 100, SamplingParams(max_tokens=None), arrival=0.0, seed=0)
    assert make_wish(add, (7,) * 20, SchedulerConfig(4, 64, 128), 0.0).output_tokens == 8


@pytest.mark.parametrize("seed", range(5))
def test_calls_that_overtake_each_other_are_taken_in_the_order_of_the_front_end(seed: int) -> None:
    """Through what numbers them, with a Ray that is none: else an end would come before its arrival

    and that request would take room for ever.
    """

    async def run() -> None:
        router, calls = RouterActor(), list[Any]()

        def handle(name: str) -> Any:
            return SimpleNamespace(
                remote=lambda *given: calls.append(getattr(router, name)(*given))
            )

        actors = Actors(Plan({"a": "both"}, {}), SimpleNamespace(routed=lambda up, why="": None))
        begin = SimpleNamespace(remote=router.begin)
        actors._router = SimpleNamespace(
            begin=SimpleNamespace(options=lambda **given: begin),
            decide=SimpleNamespace(remote=asyncio.Event().wait),
            **{name: handle(name) for name in ("assign", "arrive", "end", "lose")},
        )
        actors.lose("a")  # it would know nothing of it
        actors.route(CONFIG)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        actors.assign({"a": Duty("both", False, BOOT)})
        actors.lose("a")
        for number in range(8):
            actors.wish([wish(f"r{number}")])
            actors.end([f"r{number}"])
        actors.wish([wish("last")])
        random.Random(seed).shuffle(calls)
        for call in calls:
            await call
        await router.observe(BOOT, report("a"), [])
        assert [decision.request_id for decision in await decisions(router)] == ["last"]
        await actors.close()

    asyncio.run(run())


def test_a_call_that_never_comes_is_told_to_whoever_waits_for_decisions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(in_order, "LATE", 0.0)

    async def run() -> None:
        actor = await begun({"a": Duty("both", False, BOOT)})
        await actor.arrive(Turn(1, 2), [wish("r")])
        with pytest.raises(PagedKVError, match="call 1 did not come"):
            await actor.decide()
        await actor.begin(2, CONFIG, {})
        await actor.begin(2, CONFIG, {})  # Ray may say it twice
        await actor.observe(BOOT, report("a"), [])
        await actor.arrive(Turn(2, 0), [wish("s")])
        await actor.begin(2, CONFIG, {})
        await actor.arrive(Turn(1, 1), [wish("t")])  # of the session before
        assert [it.request_id for it in await decisions(actor)] == ["s"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("overload", "drawn", "slack"),
    [("reject", (), 1.5), ("reject", (7,), 6.0), ("best_effort", (), None)],
)
def test_a_wish_is_due_with_its_first_token_where_late_ones_are_refused(
    overload, drawn, slack
) -> None:
    """Behind that the deadline of the whole answer is what counts."""
    config = SchedulerConfig(4, 64, 128, policy="deadline", overload=overload)
    params = SamplingParams(max_tokens=9)
    add = Add("r", (1, 2, 3), params, arrival=10.0, seed=0, ttft_slo=2.5, deadline=17.0)
    assert make_wish(add, drawn, config, now=11.0).slack == slack
    assert make_wish(Add("s", (1,), params, 10.0, 0), drawn, config, now=11.0).slack is None
