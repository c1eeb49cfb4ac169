"""Two loops in threads of their own, and a front end that keeps the fence: requests to and fro."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace

import pytest
from moving import toy_worker
from test_moving_requests import alone, outcome, request

from pagedkv.engine.core_loop import CoreLoop
from pagedkv.engine.transports import SharedMemoryTransport
from pagedkv.engine.wire import (
    Batch,
    Close,
    Complete,
    Died,
    Disown,
    FromCore,
    FromPeer,
    Move,
    MoveFailed,
    MoveOrder,
    Own,
    PeerGone,
    ToPeer,
)
from pagedkv.scheduling.messages import Add, Delta
from pagedkv.transfer.fence import Fence, Raised
from pagedkv.transfer.messages import split_owned_id

WAIT = 60.0  # seconds after which a test has failed


class Loops:
    def __init__(self) -> None:
        self.workers = {
            name: toy_worker(name, {}, transport=SharedMemoryTransport()) for name in "pd"
        }
        self.news: queue.SimpleQueue[tuple[str, FromCore]] = queue.SimpleQueue()
        self.loops = {name: self.loop(name) for name in "pd"}
        self.threads = [
            threading.Thread(target=loop.run, daemon=True) for loop in self.loops.values()
        ]
        self.fence, self.deltas = Fence(), dict[str, list[Delta]]()
        self.moved = 0
        for thread in self.threads:
            thread.start()

    def loop(self, name: str) -> CoreLoop:
        worker = self.workers[name]
        return CoreLoop(worker.core, lambda frame: self.news.put((name, frame)), moves=worker.moves)

    def add(self, add: Add, worker: str) -> None:
        owned = self.fence.open(add.request_id, worker, add.params.n).owned_id
        self.deltas[add.request_id] = []
        self.loops[worker].send(replace(add, request_id=owned))

    def move(self, name: str, to: str, mode: str) -> None:
        owner = self.fence.owner(name)
        if owner is not None and owner.worker != to:
            epoch = self.fence.begin_move(name, to).epoch
            self.loops[owner.worker].send(Move(name, epoch, to, mode))

    def hear(self) -> None:
        worker, frame = self.news.get(timeout=WAIT)
        verdicts = []
        match frame:
            case Batch():
                for delta in frame.deltas:
                    move, end = split_owned_id(delta.request_id), delta.finish_reason is not None
                    new = self.fence.deliver(move, delta.sample, delta.token_ids, end)
                    if new[0] or new[1]:
                        self.deltas[move.request].append(delta)
                    verdicts += new[2]
            case ToPeer(to, data):
                self.loops[to].send(FromPeer(worker, data))
            case Complete():
                move = split_owned_id(f"{frame.request_id}@{frame.epoch}")
                verdicts += self.fence.complete(move, frame.counts, frame.ended)
            case MoveFailed():
                move = split_owned_id(f"{frame.request_id}@{frame.epoch}")
                verdicts += self.fence.move_failed(move, worker)
            case Died():
                raise AssertionError(frame.reason)
        for verdict in verdicts:
            if isinstance(verdict, Raised):
                self.moved += 1
                self.loops[verdict.new.worker].send(Own(verdict.request, verdict.new.epoch))
                self.loops[verdict.old.worker].send(Disown(verdict.request, verdict.old.epoch))
            else:
                owner = verdict.owner
                self.loops[owner.worker].send(Disown(verdict.request, owner.epoch))

    def ended(self, name: str, n: int) -> bool:
        return sum(delta.finish_reason is not None for delta in self.deltas[name]) == n

    def close(self) -> None:
        for name, loop in self.loops.items():
            loop.send(PeerGone("d" if name == "p" else "p"))
            loop.send(Close())
        for thread in self.threads:
            thread.join(WAIT)
        for worker in self.workers.values():
            worker.moves.close()
            manager = worker.manager
            manager.check()
            assert manager.num_open_sequences == 0 and not manager.leases
            assert manager.num_held_blocks == manager.num_draining_blocks == 0


def test_loops_move_requests_and_go_to_rest() -> None:
    adds = [
        request(str(i), range(i, i + 5 + 3 * i), seed=i, n=1 + (i % 4 == 3), max_tokens=30)
        for i in range(8)
    ]
    loops = Loops()
    for i, add in enumerate(adds):
        loops.add(add, "p")
        loops.move(add.request_id, "d", "prefilled" if i % 2 else "live")
    while not all(loops.ended(add.request_id, add.params.n) for add in adds):
        loops.hear()
    for add in adds:
        assert outcome(loops.deltas[add.request_id], add.params.n) == alone(add, ()), add
    assert loops.moved
    loops.close()


def test_a_parked_request_waits_without_steps_until_its_peer_is_gone() -> None:
    """Nobody answers: the loop waits, and the request goes on here."""
    loops = Loops()
    add = request("a", range(1, 9), max_tokens=5)
    loops.add(add, "p")
    loops.loops["p"].send(Move("a", 1, "nobody", "prefilled"))
    frames: list[FromCore] = []
    while not any(isinstance(frame, Batch) and frame.deltas for frame in frames):
        frames.append(loops.news.get(timeout=WAIT)[1])
        if isinstance(frames[-1], Batch):
            loops.deltas["a"] += frames[-1].deltas
    loops.loops["p"].send(PeerGone("nobody"))
    while not loops.ended("a", 1):
        frame = loops.news.get(timeout=WAIT)[1]
        if isinstance(frame, Batch):
            loops.deltas["a"] += frame.deltas
    assert outcome(loops.deltas["a"], 1) == alone(add, ())
    loops.close()


def test_what_a_move_cannot_contain_is_told(monkeypatch) -> None:
    loops = Loops()

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(loops.workers["p"].moves, "handle", fail)
    loops.loops["p"].send(PeerGone("d"))
    frames = [loops.news.get(timeout=WAIT) for _ in range(3)]  # both have begun
    assert [frame for name, frame in frames if name == "p"][-1] == Died("RuntimeError", "broken")
    loops.close()


def test_steps_go_on_while_peers_talk_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, heard = toy_worker("p", {}), 0
    batches: list[Batch] = []

    def post(frame: FromCore) -> None:
        if isinstance(frame, Batch):
            batches.append(frame)
            if any(delta.finish_reason for delta in frame.deltas):
                loop.send(Close())

    def answer(order: MoveOrder, now: float) -> None:
        nonlocal heard
        heard += 1
        assert heard < 1000, "no step in between"
        loop.send(order)

    monkeypatch.setattr(worker.moves, "handle", answer)
    loop = CoreLoop(worker.core, post, moves=worker.moves)
    loop.send(request("a@0", range(1, 9), max_tokens=5))
    loop.send(FromPeer("d", b""))
    assert loop.run()
    assert sum(len(delta.token_ids) for batch in batches for delta in batch.deltas) == 5
