"""What a worker has promised, and does not hold yet."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from moving import Cluster, Worker, toy_worker

from pagedkv.cluster import promises
from pagedkv.cluster.promises import promised_blocks
from pagedkv.cluster.reporter import Reporter
from pagedkv.scheduling.messages import Abort, Add
from pagedkv.scheduling.params import SamplingParams
from pagedkv.transfer.messages import MoveId
from pagedkv.transfer.routing import WorkerReport

BLOCK = 4


def add(name: str, prompt: int, most: int | None, n: int = 1) -> Add:
    params = SamplingParams(max_tokens=most, n=n, ignore_eos=True, seed=1)
    return Add(name, tuple(range(1, prompt + 1)), params, 0.0, 0)


def taken(worker: Worker) -> int:
    """Blocks that it holds and has promised."""
    return worker.manager.num_held_blocks + promised_blocks(worker.core, worker.moves)


def test_what_is_held_and_promised_is_what_a_request_holds_in_the_end() -> None:
    """While it waits, is half computed, and at each of its tokens."""
    worker = toy_worker("a", {}, budget=8)
    cluster = Cluster(worker)
    cluster.add(add("r", 21, 30), "a")
    worker.core.take_messages(0.0)
    seen = []
    while worker.core.has_unfinished():
        seen.append(taken(worker))
        last = worker.manager.num_held_blocks
        cluster.turn(worker)
    assert last == 13  # 21 + 30 tokens but the last, which is not computed
    assert set(seen[1:]) <= {13, 14} and taken(worker) == 0
    assert seen[0] <= 6 + promises.HEADROOM // BLOCK  # nothing was known of outputs here


def test_no_more_is_promised_than_was_asked_for_when_it_was_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(promises, "HEADROOM", 8)
    worker = toy_worker("a", {}, budget=32)
    cluster = Cluster(worker)
    cluster.add(add("r", 8, None, n=2), "a")
    promised = []
    for _ in range(12):
        cluster.turn(worker)
        promised.append(promised_blocks(worker.core, worker.moves))
    assert promised[0] == 4  # two samples with room for 7 more each
    assert promised == sorted(promised, reverse=True) and promised[-1] == 0
    worker.core.send(Abort("r@0"))
    cluster.turn(worker)


def test_a_request_that_moves_is_promised_where_it_goes_to() -> None:
    payloads: dict[object, object] = {}
    p, d = (toy_worker(name, payloads, budget=8) for name in "pd")
    cluster = Cluster(p, d)
    cluster.add(add("first", 8, 16), "d")
    cluster.run()
    cluster.add(add("r", 40, 16), "p")
    cluster.turn(p)
    assert promised_blocks(p.core, p.moves) == 12  # 32 tokens of it, and 15
    cluster.move("r", "d")
    cluster.turn(p)
    assert promised_blocks(p.core, p.moves) == 6  # the rest of its prompt alone
    cluster.turn(d)  # the handshake
    cluster.turn(p)
    cluster.turn(d)
    assert d.moves.coming == [MoveId("r", 1)]
    assert taken(d) == 10 + 1 + 4  # the output that has ended had 16 tokens
    while d.moves.busy:
        cluster.turn(p)
        cluster.turn(d)
        cluster.now += 0.3
    assert "r" in cluster.moved and not d.moves.coming
    assert taken(d) in {14, 15} and taken(p) == 0
    cluster.run()
    cluster.check_idle()


def test_a_request_is_seen_where_it_goes_to_once_its_blocks_are_there() -> None:
    """Else the router would count them as free no more, and as sent as well, until it is owned."""

    async def run() -> None:
        payloads: dict[object, object] = {}
        p, d = (toy_worker(name, payloads, budget=8) for name in "pd")
        cluster, told = Cluster(p, d), list[WorkerReport]()
        observe = SimpleNamespace(remote=lambda boot, report, events: told.append(report))
        router, loop = SimpleNamespace(observe=observe), asyncio.get_running_loop()
        reporter = Reporter("d", "boot", "host", d.core, d.moves, router, loop)
        cluster.add(add("r", 40, 16), "p")
        cluster.move("r", "d")
        while not d.moves.coming:
            cluster.turn(p)
            cluster.turn(d)
        reporter.look()
        cluster.run()
        reporter.look()
        await asyncio.sleep(0)
        assert [report.seen for report in told] == [("r",), ()]
        assert told[0].free_blocks == 64 - 11

    asyncio.run(run())
