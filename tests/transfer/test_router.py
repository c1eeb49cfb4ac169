"""The router as a pure machine: hits against load, pairs, room, waiting, deadlines."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pagedkv.errors import ConfigError
from pagedkv.transfer.events import AllBlocksCleared, BlockStored, KVEventBatch
from pagedkv.transfer.router import Router
from pagedkv.transfer.routing import (
    Arrival,
    AskForPicture,
    Assign,
    Decision,
    Ended,
    Link,
    RouterConfig,
    RouterEvent,
    SetRole,
    Shed,
    Tick,
    WorkerEvents,
    WorkerGone,
    WorkerReport,
)


def router(*reports: WorkerReport, **settings: Any) -> Router:
    r = Router(RouterConfig(16, 1000, **{"epsilon_s": 0.001, **settings}))
    for report in reports:
        r.handle(report, 0.0)
    return r


def worker(name: str, role: Any = "both", **facts: Any) -> WorkerReport:
    usual = {"num_blocks": 1000, "free_blocks": 1000, "prefill_tokens_per_s": 1000.0}
    return WorkerReport(name, role, **{**usual, **facts})


def names(n: int, prompt: str = "p") -> list[bytes]:
    return [f"{prompt}{i}".encode().ljust(16) for i in range(n)]


def holds(name: str, blocks: list[bytes], seq: int = 0) -> WorkerEvents:
    stored = BlockStored(blocks, None, [0] * 16 * len(blocks), 16, None, "GPU", None)
    return WorkerEvents(name, seq, KVEventBatch(0.0, [AllBlocksCleared(), stored]))


def want(request: str = "r", prompt: int = 160, output: int = 16, **facts: Any) -> Arrival:
    return Arrival(request, prompt, output, **facts)


def only(decisions: list[Decision]) -> Any:
    (decision,) = decisions
    return decision


def test_a_longer_cached_prefix_wins_until_the_queue_is_longer_than_it_saves() -> None:
    r = router(worker("a"), worker("b", queued_tokens=100))
    r.handle(holds("b", names(10)), 0.0)
    got = only(r.handle(want(names=names(10)), 0.0))
    assert (got.prefill, got.decode, got.cached_tokens) == ("b", "b", 159)
    assert got.prefill_s == 0.001
    r.handle(worker("b", queued_tokens=200, seen=("r",)), 1.0)
    assert only(r.handle(want("s", names=names(10)), 1.0)).prefill == "a"


def test_what_was_sent_and_not_reported_yet_counts() -> None:
    r = router(worker("a"), worker("b"))
    chosen = [only(r.handle(want(str(i), names=names(1)), 0.0)).prefill for i in range(10)]
    assert chosen.count("a") == chosen.count("b") == 5


def test_prefill_and_decode_are_chosen_together_by_host() -> None:
    r = router(
        worker("p1", "prefill", host="x"),
        worker("p2", "prefill", host="y", queued_tokens=50),
        worker("d", "decode", host="y"),
        local=Link(0.001, 1e9),
        remote=Link(0.1, 1e6),
    )
    got = only(r.handle(want(), 0.0))
    assert (got.prefill, got.decode) == ("p2", "d")
    assert got.transfer_s == 0.001 + 160 * 1000 / 1e9


def test_a_prefix_at_the_decode_worker_is_not_moved() -> None:
    slow = Link(0.0, 1e7)
    r = router(worker("p", "prefill"), worker("d1", "decode"), worker("d2", "decode"), local=slow)
    r.handle(holds("d2", names(9)), 0.0)
    got = only(r.handle(want(names=names(10)), 0.0))
    assert (got.decode, got.decode_cached_tokens) == ("d2", 144)


def test_decode_workers_grant_only_with_head_room_for_prompt_and_output() -> None:
    r = router(worker("p", "prefill"), worker("d", "decode", free_blocks=30, promised_blocks=10))
    assert r.handle(want(prompt=160, output=161), 0.0) == []
    assert r.held_for("decode") == 1
    got = only(r.handle(worker("d", "decode", free_blocks=31, promised_blocks=10), 1.0))
    assert isinstance(got, Assign)
    assert r.num_held == 0


def test_a_prefill_worker_full_of_what_waits_to_be_moved_gets_no_more() -> None:
    r = router(worker("p", "prefill", free_blocks=9), worker("d", "decode"))
    assert r.handle(want(), 0.0) == []
    assert r.held_for("prefill") == 1
    assert only(r.handle(worker("p", "prefill", free_blocks=10), 1.0)).prefill == "p"


def test_those_who_wait_are_served_in_order_and_not_overtaken() -> None:
    r = router(worker("p", "prefill", free_blocks=9), worker("d", "decode"))
    r.handle(want("long"), 0.0)
    assert r.handle(want("short", prompt=16), 0.0) == []
    assert only(r.handle(want("urgent", prompt=16, priority=-1), 0.0)).request_id == "urgent"
    got = r.handle(worker("p", "prefill", seen=("urgent",)), 1.0)
    assert [d.request_id for d in got if isinstance(d, Assign)] == ["long", "short"]


def test_shed_with_the_reason_when_the_deadline_cannot_be_met() -> None:
    r = router(worker("a", queued_tokens=1000))
    got = only(r.handle(want(deadline=1.0), 0.0))
    assert got == Shed("r", "the first token would come 0.160 s after its deadline")
    assert isinstance(only(r.handle(want(deadline=1.5), 0.0)), Assign)


def test_shed_when_the_deadline_passes_while_it_waits() -> None:
    r = router(worker("p", "prefill", free_blocks=0), worker("d", "decode"))
    assert r.handle(want(deadline=1.0), 0.0) == []
    assert r.handle(Tick(), 1.0) == []
    got = only(r.handle(Tick(), 1.1))
    assert got == Shed("r", "its deadline has passed; no prefill worker has room")
    assert (r.stats().shed, r.stats().held, r.stats().assigned) == (1, 0, 0)


def test_a_prompt_that_no_worker_can_ever_hold_is_refused() -> None:
    r = router(worker("a", num_blocks=9))
    got = only(r.handle(want(), 0.0))
    assert got.reason == "160 prompt tokens take 10 blocks, the largest prefill worker has 9"


def test_at_most_so_many_wait() -> None:
    r = router(max_held=1)
    assert r.handle(want("a"), 0.0) == []
    got = only(r.handle(want("b"), 0.0))
    assert got.reason == "no prefill worker is there, and max_held=1 requests wait already"


def test_one_that_waits_and_is_aborted_is_forgotten() -> None:
    r = router()
    r.handle(want("a"), 0.0)
    r.handle(Ended("a"), 0.0)
    r.handle(Ended("never seen"), 0.0)
    assert r.num_held == 0
    assert r.handle(worker("a"), 1.0) == []


def test_gap_a_worker_whose_events_are_missing_is_forgotten_and_asked_for_a_picture() -> None:
    r = router(worker("a"), worker("b", queued_tokens=100))
    r.handle(holds("b", names(10)), 0.0)
    missing = WorkerEvents("b", 2, KVEventBatch(0.0, []))
    assert r.handle(missing, 0.0) == [AskForPicture("b")]
    assert r.handle(missing, 0.5) == []
    assert r.handle(missing, 1.0) == [AskForPicture("b")]
    assert only(r.handle(want(names=names(10)), 1.0)).prefill == "a"
    assert r.handle(holds("b", names(10), seq=3), 1.0) == []
    assert only(r.handle(want("s", names=names(10)), 1.0)).prefill == "b"
    stats = r.stats()
    assert (stats.gaps, stats.names, stats.workers) == (1, 10, 2)
    assert (stats.assigned, stats.prompt_tokens, stats.cached_tokens) == (2, 320, 159)


def test_dead_worker_nothing_of_it_is_left() -> None:
    r = router(worker("a"), worker("b", queued_tokens=100))
    r.handle(holds("b", names(10)), 0.0)
    assert only(r.handle(want(names=names(10)), 0.0)).prefill == "b"
    r.handle(WorkerGone("b"), 0.0)
    r.handle(WorkerGone("b"), 0.0)
    assert len(r.prefixes) == 0
    r.handle(worker("c"), 0.0)  # takes the place of b, and nothing of it
    assert only(r.handle(want("s", names=names(10)), 0.0)).cached_tokens == 0
    r.handle(Ended("r"), 0.0)
    r.handle(Ended("s"), 0.0)


def test_a_worker_that_drains_gets_nothing() -> None:
    r = router(worker("a", draining=True), worker("b", queued_tokens=500))
    assert only(r.handle(want(), 0.0)).prefill == "b"


def test_ties_equal_prompts_meet_and_stay_when_other_workers_come_and_go() -> None:
    def homes(*workers: str) -> dict[str, str]:
        chosen = {}
        for i in range(60):
            r = router(*map(worker, workers))
            prompt = f"prompt {i} "
            got = only(r.handle(want(names=names(1, prompt)), 0.0))
            again = router(*map(worker, workers))
            assert only(again.handle(want("x", names=names(1, prompt)), 0.0)).prefill == got.prefill
            chosen[prompt] = got.prefill
        return chosen

    four, three = homes("a", "b", "c", "d"), homes("a", "b", "c")
    assert set(four.values()) == set("abcd")
    assert all(three[p] == home for p, home in four.items() if home != "d")


def test_tpot_a_decode_worker_that_is_too_slow_is_passed_over() -> None:
    r = router(
        worker("p", "prefill"),
        worker("d1", "decode", step_s=0.06, step_s_per_sequence=0.01),
        worker("d2", "decode", step_s=0.03, step_s_per_sequence=0.01),
    )
    assert only(r.handle(want(tpot=0.05), 0.0)).decode == "d2"
    assert r.handle(want("s", tpot=0.05), 0.0) != []
    got = only(r.handle(want("t", tpot=0.05), 0.0))
    assert got.reason == "no decode worker makes a step in the 0.05 s that it asks for"
    assert isinstance(only(r.handle(want("u"), 0.0)), Assign)


def test_events_and_decisions_survive_the_wire() -> None:
    events = [
        worker("a", seen=("r",)),
        WorkerGone("a"),
        holds("a", names(2)),
        want(names=names(2), deadline=1.0, tpot=0.1),
        Ended("r"),
        Tick(),
    ]
    for event in events:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=RouterEvent) == event
    decisions = [
        Assign("r", "p", "d", 16, 0, 0.1, 0.2, 0.3),
        Shed("r", "late"),
        AskForPicture("a"),
        SetRole("a", "decode"),
    ]
    for decision in decisions:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(decision), type=Decision) == decision


def test_a_request_id_that_waits_twice_or_comes_again_does_no_harm() -> None:
    r = router(worker("p", "prefill", free_blocks=0), worker("d", "decode"))
    r.handle(want("r"), 0.0)
    r.handle(want("r"), 0.0)
    assert r.num_held == 1
    r.handle(Ended("r"), 0.0)
    r.handle(want("r", deadline=1.0), 0.0)
    assert len(r.handle(Tick(), 2.0)) == 1
    r.handle(worker("p", "prefill"), 3.0)
    assert isinstance(only(r.handle(want("r"), 3.0)), Assign)
    assert isinstance(only(r.handle(want("r"), 3.0)), Assign)  # resumed after its worker died
    r.handle(Ended("r"), 4.0)
    p = r.fleet.places["p"]
    assert (r.fleet.columns["room"][p], r.fleet.columns["queued_tokens"][p]) == (1000, 0)


def test_a_rate_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefill_tokens_per_s=0"):
        router(worker("a", prefill_tokens_per_s=0.0))


@pytest.mark.parametrize(
    ("setting", "value"),
    [("epsilon_s", -0.1), ("max_held", -1), ("local", Link(-1.0, 1.0)), ("remote", Link(0.0, 0.0))],
)
def test_a_configuration_that_cannot_be_is_refused(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{setting}="):
        router(**{setting: value})


def test_the_same_events_give_the_same_decisions() -> None:
    def run() -> list[Decision]:
        r = router(worker("p", "prefill"), worker("d", "decode"), worker("e", "decode"))
        return [d for i in range(50) for d in r.handle(want(str(i), prompt=32 + i), float(i))]

    assert run() == run()
