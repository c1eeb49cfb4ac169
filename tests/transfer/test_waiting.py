"""Who waits for room at the router, and who is next."""

from __future__ import annotations

from typing import Any

from pagedkv.transfer.placement import NoPair
from pagedkv.transfer.router import Router
from pagedkv.transfer.routing import Arrival, Assign, RouterConfig, Shed, WorkerReport
from pagedkv.transfer.waiting import Held, Names, Waiting


def held(number: int, tenant: str | None = None, **facts: Any) -> Held:
    arrival = Arrival(f"r{number}", facts.pop("prompt", 10), 0, tenant=tenant, **facts)
    return Held(arrival.priority, number, arrival, Names(()), NoPair("no room"))


def served(waiting: Waiting) -> list[int]:
    """The numbers of all that wait, in the order in which they get room."""
    order = []
    while waiting:
        order.append(waiting.serve().number)
    return order


def test_tenants_get_room_in_turn_whoever_came_first() -> None:
    waiting = Waiting()
    for number in range(6):
        waiting.push(held(number, "flood"))
    waiting.push(held(6, "other"))
    waiting.push(held(7, "other"))
    assert served(waiting) == [0, 6, 1, 7, 2, 3, 4, 5]
    assert len(waiting) == 0


def test_turns_go_by_tokens_and_weights() -> None:
    waiting = Waiting()
    for number in range(4):
        waiting.push(held(number, "long", prompt=30))
        waiting.push(held(number + 10, "short", prompt=10))
        waiting.push(held(number + 20, "heavy", prompt=30, weight=3.0))
    assert served(waiting)[:9] == [0, 10, 20, 11, 21, 12, 22, 1, 13]


def test_who_comes_late_does_not_have_the_past_made_up() -> None:
    waiting = Waiting()
    for number in range(5):
        waiting.push(held(number, "early"))
    assert [waiting.serve().number for _ in range(3)] == [0, 1, 2]
    for number in (5, 6, 7):
        waiting.push(held(number, "late"))
    assert served(waiting) == [3, 5, 4, 6, 7]


def test_priorities_come_before_turns() -> None:
    waiting = Waiting()
    waiting.push(held(0, "a"))
    waiting.push(held(1, "a", priority=1))
    waiting.push(held(2, "b", priority=1))
    waiting.push(held(3, "a", priority=-1))
    assert served(waiting) == [3, 0, 2, 1]


def test_those_who_leave_are_gone_and_nobody_else() -> None:
    waiting = Waiting()
    for number in range(4):
        waiting.push(held(number, "ab"[number % 2], deadline=float(number)))
    waiting.drop("r1")
    waiting.drop("never here")
    assert [it.number for it in waiting.expire(0.5)] == [0]
    assert waiting.expire(0.5) == []
    assert served(waiting) == [2, 3]


def router(most: int) -> Router:
    r = Router(RouterConfig(16, 1000, max_held=most))
    r.handle(WorkerReport("p", "prefill", 1000, 0, 1000.0), 0.0)
    r.handle(WorkerReport("d", "decode", 1000, 1000, 1000.0), 0.0)
    return r


def test_a_flood_neither_fills_the_router_nor_holds_up_the_others() -> None:
    r = router(most=4)
    for number in range(4):
        assert r.handle(Arrival(f"f{number}", 160, 16, tenant="flood"), 0.0) == []
    (shed,) = r.handle(Arrival("f4", 160, 16, tenant="flood"), 0.0)
    assert isinstance(shed, Shed)
    assert shed.request_id == "f4"
    (shed,) = r.handle(Arrival("o0", 160, 16, tenant="other"), 0.0)
    assert shed == Shed("f3", "max_held=4 requests wait already, most of them of its tenant")
    (shed,) = r.handle(Arrival("o1", 160, 16, tenant="other"), 0.0)
    assert shed.request_id == "f2"
    (shed,) = r.handle(Arrival("o2", 160, 16, tenant="other"), 0.0)
    assert shed.request_id == "o2"
    got = r.handle(WorkerReport("p", "prefill", 1000, 1000, 1000.0), 1.0)
    assert [it.request_id for it in got if isinstance(it, Assign)] == ["f0", "o0", "f1", "o1"]
