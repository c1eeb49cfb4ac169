"""The actor that routes, without Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from pagedkv.cluster.router_actor import RouterActor
from pagedkv.cluster.router_messages import Duty, Wish, make_wish
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.tenants import Tenant
from pagedkv.transfer.routing import Assign, FlipConfig, RouterConfig, SetRole, WorkerReport

CONFIG = RouterConfig(4, 1)


def report(name: str, free: int = 100, **given: Any) -> WorkerReport:
    return WorkerReport(name, "both", 100, free, 1000.0, **given)


def wish(name: str) -> Wish:
    return Wish(name, np.arange(8, dtype="<i4").tobytes(), 8)


async def begun(duties: dict[str, Duty], config: RouterConfig = CONFIG) -> RouterActor:
    actor = RouterActor()
    await actor.begin(config, {})
    await actor.assign(duties)
    for name in duties:
        await actor.observe(report(name), [])
    return actor


def test_what_a_worker_is_for_is_what_the_front_end_says() -> None:
    async def run() -> None:
        actor = await begun({"a": Duty("prefill", False), "b": Duty("decode", False)})
        await actor.observe(report("unknown"), [])
        await actor.arrive([wish("r")])
        [decision] = await actor.decide()
        assert isinstance(decision, Assign)
        assert (decision.prefill, decision.decode) == ("a", "b")
        await actor.assign({"a": Duty("decode", False), "b": Duty("prefill", False)})
        await actor.arrive([wish("s")])
        [decision] = await actor.decide()
        assert isinstance(decision, Assign)
        assert (decision.prefill, decision.decode) == ("b", "a")

    asyncio.run(run())


def test_a_side_that_starves_gets_a_worker_of_the_other() -> None:
    async def run() -> None:
        flip = FlipConfig(patience_s=1e-6, rest_s=1e6)
        prefills = {f"p{i}": Duty("prefill", False) for i in range(2)}
        duties = {**prefills, "d": Duty("decode", False)}
        actor = await begun(duties, RouterConfig(4, 1, flip=flip))
        await actor.observe(report("d", free=0), [])
        await actor.arrive([wish("r")])  # waits: it has no room to decode
        [decision] = await actor.decide()
        assert isinstance(decision, SetRole) and decision.role == "decode"
        assert decision.worker in prefills
        await actor.assign({**duties, decision.worker: Duty("decode", False)})
        [placed] = await actor.decide()
        assert isinstance(placed, Assign) and placed.decode == decision.worker

    asyncio.run(run())


def test_an_error_of_any_call_comes_to_whoever_waits_for_decisions() -> None:
    """Nobody looks at what becomes of a report."""

    async def run() -> None:
        actor = await begun({"a": Duty("both", False)})
        await actor.observe(report("a"), [(0, b"no events")])
        with pytest.raises(msgspec.DecodeError):
            await actor.decide()
        await actor.arrive([wish("r")])  # it has no router any more
        await actor.begin(CONFIG, {})
        await actor.observe(report("a"), [])
        await actor.arrive([wish("r")])
        assert len(await actor.decide()) == 1

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
