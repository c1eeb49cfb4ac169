"""What happens to a move from outside: aborts, rivals, refusals, a peer that is started again."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from moving import Cluster, toy_worker
from test_moving_requests import alone, check, outcome, request

from pagedkv.engine import moves
from pagedkv.engine.wire import Move, PeerGone
from pagedkv.errors import ConfigError
from pagedkv.scheduling.messages import Abort, Resume
from pagedkv.transfer.state import pack_state

MODES = ("prefilled", "live")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [1, 2])
def test_an_abort_at_any_moment_of_a_move_ends_the_request_alone(mode: str, n: int) -> None:
    """LMCache#3688, sglang#37833, sglang#33507: the engine died, the blocks were held until the
    last token, the end was reported as another."""
    moved = 0
    for turns in range(1, 14):
        shared: dict = {}
        cluster = Cluster(*(toy_worker(name, shared, budget=12) for name in "pd"))
        cluster.add(request("a", range(1, 24), n=n, max_tokens=90), "p")
        cluster.add(request("b", range(7, 30), max_tokens=20), "p")
        cluster.move("a", "d", mode)
        for _ in range(turns):
            for worker in cluster.workers.values():
                cluster.turn(worker)
        owner = cluster.fence.owner("a")
        assert owner is not None
        cluster.aborts.append(Abort("a"))
        cluster.abort(owner, cluster.aborts[0])
        left = 0
        while not cluster.ended("a"):
            for worker in cluster.workers.values():
                cluster.turn(worker)
            left += 1
        assert left <= 2
        cluster.run()
        _, reasons = outcome(cluster.deltas["a"], n)
        assert reasons == ["abort"] * n
        assert outcome(cluster.deltas["b"], 1) == alone(cluster.adds["b"], ())
        cluster.check_idle()
        moved += len(cluster.moved)
    assert moved > 0


@pytest.mark.parametrize("n", [1, 2])
def test_of_two_moves_of_one_request_one_becomes_its_owner(n: int) -> None:
    winners = set()
    for turns in range(8):
        shared: dict = {}
        cluster = Cluster(*(toy_worker(name, shared, budget=12) for name in "pde"))
        cluster.add(request("a", range(1, 24), n=n, max_tokens=40), "p")
        cluster.move("a", "d", "live")
        for _ in range(turns):
            for worker in cluster.workers.values():
                cluster.turn(worker)
        if cluster.moved:
            cluster.run()
            break
        cluster.move("a", "e", "live")
        cluster.run()
        check(cluster, ())
        assert cluster.moved == ["a"]
        winners |= {
            name for name in "de" if cluster.workers[name].core.scheduler.counters.generation_tokens
        }
    assert "e" in winners


def test_an_order_to_move_that_an_older_one_follows_is_obeyed() -> None:
    shared: dict = {}
    cluster = Cluster(*(toy_worker(name, shared) for name in "pde"))
    cluster.add(request("a", range(1, 24), max_tokens=40), "p")
    first, second = cluster.fence.begin_move("a", "d"), cluster.fence.begin_move("a", "e")
    cluster.order("p", Move("a", second.epoch, "e", "live"))
    cluster.order("p", Move("a", first.epoch, "d", "live"))
    cluster.run()
    check(cluster, ())
    assert cluster.moved == ["a"]
    assert [(it.epoch, it.reason) for it in cluster.failed] == [
        (first.epoch, "a newer move of the request is under way")
    ]


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_is_to_move_to_its_own_worker_goes_on(mode: str) -> None:
    p = toy_worker("p", {})
    cluster = Cluster(p)
    cluster.add(request("a", range(1, 24), max_tokens=12), "p")
    move = cluster.fence.begin_move("a", "p")
    cluster.order("p", Move("a", move.epoch, "p", mode))
    cluster.run()
    check(cluster, ())
    assert [it.reason for it in cluster.failed] == ["the request is at 'p' already"]


@pytest.mark.parametrize("mode", MODES)
def test_a_peer_of_another_model_is_refused_by_name_and_nobody_waits(mode: str) -> None:
    """TensorRT-LLM#6507, llm-d#2433: wrong output, or a client that waits for ever."""
    shared: dict = {}
    cluster = Cluster(toy_worker("p", shared), toy_worker("d", shared, model=b"other"))
    cluster.add(request("a", range(1, 24), max_tokens=12), "p")
    cluster.move("a", "d", mode)
    cluster.run()
    check(cluster, ())
    [failed] = cluster.failed
    assert not cluster.moved and "'d'" in failed.reason and "model" in failed.reason
    assert cluster.now < cluster.workers["p"].moves.endpoint.limits.lease


@pytest.mark.parametrize("mode", MODES)
def test_a_full_receiver_is_asked_for_a_while_and_the_request_goes_on_where_it_is(
    mode: str,
) -> None:
    shared: dict = {}
    p, d = toy_worker("p", shared), toy_worker("d", shared, num_blocks=12)
    cluster = Cluster(p, d)
    cluster.add(request("full", range(40, 1, -1), max_tokens=9), "d")
    cluster.turn(d)
    while not cluster.deltas["full"]:
        cluster.turn(d)
    held = d.manager.num_held_blocks
    cluster.add(request("a", range(1, 24), max_tokens=150), "p")
    cluster.move("a", "d", mode)
    while not cluster.failed:
        cluster.turn(p)
        cluster.turn(d, step=False)
        assert d.manager.num_held_blocks == held
        cluster.now += 0.3
    assert re.fullmatch(
        r"'d' gave no room within 30.0 s: \d+ blocks needed and 0 kept for others, 2 available",
        cluster.failed[0].reason,
    )
    cluster.run()
    check(cluster, ())
    assert not cluster.moved


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("again", ["p", "d"])
def test_a_worker_of_the_same_name_comes_back(again: str, mode: str, told: bool) -> None:
    """vllm#49238: what was known of a peer's earlier start crashed or stalled the other side.

    At any moment of a move; the next move is between the same names.
    """
    for turns in range(1, 12):
        shared: dict = {}
        cluster = Cluster(*(toy_worker(name, shared, budget=12) for name in "pd"))
        cluster.add(request("a", range(1, 24), max_tokens=30), "p")
        cluster.move("a", "d", mode)
        for _ in range(turns):
            for worker in cluster.workers.values():
                cluster.turn(worker)
        forget(cluster.workers[again])
        cluster.workers[again] = toy_worker(again, shared, budget=12, boot=2)
        cluster.act(cluster.fence.worker_lost(again))
        other = "d" if again == "p" else "p"
        if told:
            cluster.order(other, PeerGone(again))
        cluster.add(request("b", range(7, 30), max_tokens=30), "p")
        assert cluster.move("b", "d", mode)
        cluster.run()
        check(cluster, ())
        assert "b" in cluster.moved


@pytest.mark.parametrize("mode", MODES)
def test_what_a_dead_receiver_was_to_get_goes_to_another_and_is_computed_once(mode: str) -> None:
    """The sender has kept its K/V: whatever had been sent by then, they are sent again."""
    length, output = 23, 40
    for turns in range(1, 9):
        shared: dict = {}
        cluster = Cluster(*(toy_worker(name, shared, budget=12) for name in "pde"))
        cluster.add(request("a", range(1, 1 + length), max_tokens=output), "p")
        cluster.move("a", "d", mode)
        for _ in range(turns):
            for worker in cluster.workers.values():
                cluster.turn(worker)
        if cluster.moved:
            cluster.run()
            break
        forget(cluster.workers.pop("d"))
        cluster.act(cluster.fence.worker_lost("d"))
        for worker in cluster.workers:
            cluster.order(worker, PeerGone("d"))
        assert cluster.move("a", "e", "live")
        cluster.run()
        check(cluster, ())
        assert cluster.moved == ["a"]
        computed = sum(worker.computed for worker in cluster.workers.values())
        assert computed == length + output - 1
    assert turns > 2


def test_where_nothing_is_found_by_name_nothing_moves() -> None:
    """vllm#26896: the receiver computed all that had been moved again."""
    with pytest.raises(ConfigError, match="prefix caching is off"):
        toy_worker("p", {}, prefix_caching=False)


def forget(worker) -> None:
    """What a process had dies with it."""
    manager = worker.manager
    for lease in list(manager.leases):
        manager.end_lease(lease)
    for seq in manager.table.seqs[manager.table.seqs > 0].tolist():
        manager.close(seq)


def test_a_state_that_is_not_what_was_committed_is_not_gone_on_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ended(resume: Resume) -> bytes:
        outputs = tuple(replace(output, finish_reason="stop") for output in resume.outputs)
        return pack_state(replace(resume, outputs=outputs))

    monkeypatch.setattr(moves, "pack_state", ended)
    shared: dict = {}
    cluster = Cluster(toy_worker("p", shared), toy_worker("d", shared))
    cluster.add(request("a", range(1, 24), max_tokens=6), "p")
    cluster.move("a", "d")
    cluster.run()
    assert [it.reason for it in cluster.failed] == [
        "samples ended by the state: (True,), by the commit: (False,)"
    ]
    check(cluster, ())
