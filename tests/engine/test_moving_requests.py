"""Requests move between workers over the toy model, whose attention refuses a wrong entry."""

from __future__ import annotations

import random

import pytest
from moving import VOCAB, Cluster, Worker, toy_worker

from pagedkv.cache import BlockManager
from pagedkv.engine.core import EngineCore
from pagedkv.engine.toy import ToyExecutor
from pagedkv.engine.transports import SharedMemoryTransport
from pagedkv.engine.wire import Disown, FromPeer, PeerGone
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import BeamSearchParams, SamplingParams
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.transfer.messages import MoveId, unpack
from pagedkv.transfer.payload import UInt8

EOS = (3, 11)
Outcome = tuple[list[tuple[int, ...]], list[str | None]]


def request(name: str, prompt: range | list[int], seed: int = 5, **params) -> Add:
    return Add(name, tuple(prompt), SamplingParams(**params), 0.0, seed)


def alone(add: Add, eos: tuple[int, ...] = EOS) -> Outcome:
    """In one worker with room for everything."""
    manager = BlockManager(200, 16, prefix_caching=False, max_seqs=8)
    config = SchedulerConfig(8, 300, 200, eos, VOCAB)
    core = EngineCore(Scheduler(manager, config), ToyExecutor(200, 16, VOCAB))
    core.send(add)
    deltas = []
    while core.has_unfinished():
        deltas += core.step(0.0)[0]
    return outcome(deltas, add.params.n)


def outcome(deltas, n: int) -> Outcome:
    own = [[d for d in deltas if d.sample == i] for i in range(n)]
    tokens = [tuple(t for d in mine for t in d.token_ids) for mine in own]
    return tokens, [mine[-1].finish_reason for mine in own]


def check(cluster: Cluster, eos: tuple[int, ...] = EOS) -> None:
    for name, add in cluster.adds.items():
        assert outcome(cluster.deltas[name], add.params.n) == alone(add, eos), name
    cluster.check_idle()


@pytest.mark.parametrize("sizes", [(4, 4), (4, 3), (2, 16)])
@pytest.mark.parametrize("n", [1, 3])
def test_prefill_here_and_decode_there(sizes: tuple[int, int], n: int) -> None:
    shared: dict = {}
    p, d = (
        toy_worker(name, shared, 256 // size, size, eos=EOS)
        for name, size in zip("pd", sizes, strict=True)
    )
    cluster = Cluster(p, d)
    add = request("a", range(1, 24), n=n, max_tokens=8)
    cluster.add(add, "p")
    cluster.move("a", "d")
    cluster.run()
    check(cluster)
    assert cluster.moved == ["a"] and not cluster.failed
    # The prompt was computed once, whatever follows.
    assert dict(d.core.scheduler.counters.moved_tokens)["sent"] == 23
    assert d.core.scheduler.counters.recomputed_tokens == 0


@pytest.mark.parametrize("mode", ["prefilled", "live"])
@pytest.mark.parametrize("steps", range(1, 9))
def test_a_move_may_begin_at_any_step(steps: int, mode: str) -> None:
    shared: dict = {}
    cluster = Cluster(*(toy_worker(name, shared, budget=6) for name in "pd"))
    cluster.add(request("a", range(1, 24), max_tokens=12), "p")
    for _ in range(steps):
        cluster.turn(cluster.workers["p"])
    assert cluster.move("a", "d", mode)
    cluster.run()
    check(cluster, ())
    assert cluster.moved == ["a"] and not cluster.failed
    assert cluster.workers["d"].core.scheduler.counters.recomputed_tokens == 0


@pytest.mark.parametrize("silent", [True, False])
def test_a_request_goes_on_where_it_is_when_nobody_takes_it(silent: bool) -> None:
    """Nothing comes of what is sent, or the peer is known to be dead."""
    shared: dict = {}
    cluster = Cluster(*(toy_worker(name, shared) for name in "pd"), lose=lambda: True)
    cluster.add(request("a", range(1, 24), max_tokens=6), "p")
    cluster.move("a", "d")
    p = cluster.workers["p"]
    while not cluster.deltas["a"]:
        cluster.turn(p)
    for _ in range(5):
        cluster.turn(p)
    assert len(cluster.tokens("a")[0]) == 1  # it stands still
    if not silent:
        cluster.order("p", PeerGone("d"))
    cluster.run(turns=200)
    check(cluster, ())
    assert not cluster.moved and len(cluster.failed) == 1


@pytest.mark.parametrize("watermark", [0.0, 0.5])
def test_what_moves_in_leaves_the_watermark_to_those_who_run(watermark: float) -> None:
    shared: dict = {}
    p, d = toy_worker("p", shared), toy_worker("d", shared, num_blocks=16, watermark=watermark)
    cluster = Cluster(p, d)
    cluster.add(request("runs", range(30, 38), max_tokens=20), "d")
    cluster.add(request("comes", range(1, 24), max_tokens=6), "p")
    cluster.move("comes", "d")
    beside: list[bool] = []

    def look() -> None:
        if cluster.moved and not beside:
            beside.append(cluster.is_open("runs"))

    cluster.run(each=look)
    check(cluster, ())
    assert beside == [not watermark]  # 8 of 16 blocks are not left beside 7 and what runs
    assert not cluster.failed


def test_to_and_fro_while_it_decodes() -> None:
    shared: dict = {}
    cluster = Cluster(*(toy_worker(name, shared, block_size=3 + (name == "d")) for name in "pd"))
    cluster.add(request("a", range(1, 24), max_tokens=80, temperature=1.0), "p")

    def on() -> None:
        owner = cluster.fence.owner("a") if cluster.is_open("a") else None
        if owner is not None and not cluster.busy_moving:
            cluster.move("a", "d" if owner.worker == "p" else "p", "live")

    cluster.run(each=on)
    check(cluster, ())
    assert len(cluster.moved) > 5 and not cluster.failed
    for worker in cluster.workers.values():
        assert worker.core.scheduler.counters.recomputed_tokens == 0


def test_a_reservation_behind_its_disown_holds_nothing() -> None:
    """The front end has given the move up before the sender's first word came."""
    shared: dict = {}
    p, d = (toy_worker(name, shared) for name in "pd")
    cluster = Cluster(p, d)
    cluster.add(request("a", range(1, 24), max_tokens=40), "p")
    cluster.move("a", "d", "live")
    while "Reserve" not in kinds(d):
        if d.inbox:  # a handshake
            cluster.turn(d)
        cluster.turn(p)
    d.inbox.appendleft(Disown("a", 1))
    cluster.turn(d)
    assert not d.moves.endpoint.receiver.moves and d.manager.num_held_blocks == 0
    cluster.run()
    check(cluster, ())
    assert not cluster.moved and len(cluster.failed) == 1


def test_a_request_that_is_disowned_before_its_first_step_never_runs() -> None:
    worker = toy_worker("p", {})
    worker.core.send(request("a@0", range(1, 24), max_tokens=40))
    worker.moves.handle(Disown("a", 0), 0.0)
    deltas, stats = worker.core.step(0.0)
    assert stats is None and [delta.finish_reason for delta in deltas] == ["abort"]
    assert not worker.core.has_unfinished() and not worker.core.request_ids


def kinds(worker: Worker) -> list[str]:
    """Of the messages of other workers that wait for it."""
    frames = [order.frame for order in worker.inbox if isinstance(order, FromPeer)]
    return [type(unpack(frame)).__name__ for frame in frames]


@pytest.mark.parametrize("used_again", [0, 1, 2])
def test_memory_that_is_used_again_while_it_is_read_is_read_again(used_again: int) -> None:
    class Sending(SharedMemoryTransport):
        puts = 0

        def put(self, move: MoveId, number: int, blocks: UInt8) -> bytes:
            self.puts += 1
            return super().put(move, number, blocks)

    class Reading(SharedMemoryTransport):
        answers = iter([False] * used_again)

        def is_intact(self) -> bool:
            return next(self.answers, super().is_intact())

    sending, reading = Sending(), Reading()
    p, d = toy_worker("p", {}, transport=sending), toy_worker("d", {}, transport=reading)
    cluster = Cluster(p, d)
    cluster.add(request("a", range(1, 14), max_tokens=8), "p")
    cluster.move("a", "d")
    cluster.run()
    check(cluster, ())
    assert cluster.moved == ["a"] and dict(d.core.scheduler.counters.moved_tokens)["sent"] == 13
    assert sending.puts == 1 + used_again  # each time all that was in it
    sending.close()
    reading.close()


def random_add(rng: random.Random, name: str) -> Add:
    prompt = [rng.choice((1, 2))] * rng.randrange(9) + [
        rng.randrange(VOCAB) for _ in range(rng.randint(1, 14))
    ]
    if rng.random() < 0.15:
        beam = BeamSearchParams(rng.choice((2, 3)), rng.randint(1, 8))
        return Add(name, tuple(prompt), beam.sampling, 0.0, 0, beam=beam)
    return request(
        name,
        prompt,
        rng.randrange(99),
        n=rng.choice((1, 1, 1, 2, 3)),
        temperature=rng.choice((0.0, 1.0)),
        max_tokens=rng.randint(1, 16),
        logprobs=rng.choice((None, 2)),
        prompt_logprobs=rng.choice((None, None, 1)),
    )


@pytest.mark.parametrize("seed", range(20))
def test_random_moves_of_random_requests_under_pressure(seed: int) -> None:
    """Pools that are too small for all, frames that are lost, K/V that is shared."""
    rng = random.Random(seed)
    shared: dict = {}
    losses = rng.choice((0.0, 0.0, 0.1))
    workers = [
        toy_worker(
            name,
            shared,
            num_blocks=100 // size,
            block_size=size,
            budget=rng.choice((8, 16)),
            eos=EOS,
            spare=rng.choice((1, 4)),
            sanitize=seed % 3 == 0,
        )
        for name, size in zip("pde", rng.choices((1, 2, 3, 4, 8), k=3), strict=True)
    ]
    cluster = Cluster(*workers, lose=lambda: rng.random() < losses)
    adds = [random_add(rng, f"r{i}") for i in range(12)]

    def each() -> None:
        if adds and rng.random() < 0.4:
            add = adds.pop()
            cluster.add(add, rng.choice("pde"))
            if rng.random() < 0.6:
                cluster.move(add.request_id, rng.choice("pde"))
        elif rng.random() < 0.3 and cluster.adds:
            name = rng.choice(sorted(cluster.adds))
            cluster.move(name, rng.choice("pde"), rng.choice(("live", "live", "prefilled")))

    each()
    while adds:
        cluster.run(each=each)
    cluster.run(each=each)
    check(cluster)
    assert cluster.moved
