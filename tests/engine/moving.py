"""Workers in one process that are stepped by hand, and a front end that owns the fence."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

from pagedkv.cache import BlockManager
from pagedkv.engine import toy
from pagedkv.engine.core import EngineCore
from pagedkv.engine.moves import Moves
from pagedkv.engine.toy import ToyExecutor
from pagedkv.engine.transports import LocalTransport, Transport
from pagedkv.engine.wire import (
    Complete,
    Disown,
    FromPeer,
    Move,
    MoveFailed,
    MoveNews,
    MoveOrder,
    Own,
    ToPeer,
    pack,
    unpack_from_core,
    unpack_to_core,
)
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Abort, Add, Delta, Drawn, Resume
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.transfer.fence import Disowned, Fence, Orphaned, Owner, Raised, Verdict
from pagedkv.transfer.limits import TransferLimits
from pagedkv.transfer.messages import Hello, MoveId, split_owned_id

VOCAB = 50


def toy_hello(name: str, manager: BlockManager, boot: int = 1, model: bytes = b"toy") -> Hello:
    return Hello(
        name,
        boot,
        model,
        toy.NUM_LAYERS,
        toy.NUM_KV_HEADS,
        toy.HEAD_DIM,
        "float32",
        manager.block_size,
        manager.num_blocks,
    )


class Worker:
    """A core and the moves of its requests."""

    def __init__(self, name: str, core: EngineCore, moves: Moves) -> None:
        self.name, self.core, self.moves = name, core, moves
        self.inbox: deque[MoveOrder | Abort] = deque()
        self.computed = 0  # tokens

    @property
    def manager(self) -> BlockManager:
        return self.core.scheduler.manager


def toy_worker(
    name: str,
    payloads: dict,
    num_blocks: int = 64,
    block_size: int = 4,
    budget: int = 16,
    max_num_seqs: int = 8,
    eos: tuple[int, ...] = (),
    spare: int = 4,
    limits: TransferLimits | None = None,
    transport: Transport | None = None,
    sanitize: bool = False,
    boot: int = 1,
    model: bytes = b"toy",
    prefix_caching: bool = True,
    **settings,
) -> Worker:
    manager = BlockManager(
        num_blocks,
        block_size,
        prefix_caching,
        max_seqs=max_num_seqs + spare,
        sanitize=sanitize,
    )
    config = SchedulerConfig(max_num_seqs, budget, 200, eos, VOCAB, **settings)
    executor = ToyExecutor(num_blocks, block_size, VOCAB, sanitizer=manager.sanitizer)
    core = EngineCore(Scheduler(manager, config), executor)
    transport = transport or LocalTransport(payloads, name)
    ours = toy_hello(name, manager, boot, model)
    return Worker(name, core, Moves(core, executor, transport, ours, limits))


class Cluster:
    """The front end of some workers. now: the clock of all of them.

    lose: whether a frame between two workers is lost.
    """

    def __init__(self, *workers: Worker, lose: Callable[[], bool] = lambda: False) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self.fence, self.now, self.lose = Fence(), 0.0, lose
        self.adds: dict[str, Add] = {}
        self.deltas: dict[str, list[Delta]] = {}
        self.moved: list[str] = []  # requests whose ownership has moved
        self.failed: list[MoveFailed] = []
        self.aborts: list[Abort] = []  # what it has ended itself, under its own ids

    def add(self, add: Add, worker: str) -> None:
        move = self.fence.open(add.request_id, worker, add.params.n)
        self.adds[add.request_id], self.deltas[add.request_id] = add, []
        self.workers[worker].core.send(replace(add, request_id=move.owned_id))

    def abort(self, owner: Owner, abort: Abort) -> None:
        owned = MoveId(abort.request_id, owner.epoch).owned_id
        self.order(owner.worker, replace(abort, request_id=owned))

    def move(self, request: str, to: str, mode: str = "prefilled") -> bool:
        """False: it has ended, or is there already."""
        owner = self.fence.owner(request) if self.is_open(request) else None
        if owner is None or owner.worker == to:
            return False
        move = self.fence.begin_move(request, to)
        self.order(owner.worker, Move(request, move.epoch, to, mode))
        return True

    def is_open(self, request: str) -> bool:
        return not self.ended(request)

    def ended(self, request: str) -> bool:
        ends = [delta for delta in self.deltas[request] if delta.finish_reason is not None]
        return len(ends) == self.adds[request].params.n

    def order(self, worker: str, order: MoveOrder | Abort) -> None:
        back = unpack_to_core(pack(order))
        assert back == order
        self.workers[worker].inbox.append(order)

    def tokens(self, request: str) -> list[tuple[int, ...]]:
        own = self.deltas[request]
        return [
            tuple(chain.from_iterable(d.token_ids for d in own if d.sample == i))
            for i in range(self.adds[request].params.n)
        ]

    def turn(self, worker: Worker, step: bool = True) -> None:
        """What a loop does once: messages, a step, what follows from it."""
        while worker.inbox:
            message = worker.inbox.popleft()
            if isinstance(message, Abort):
                worker.core.send(message)
            else:
                worker.moves.handle(message, self.now)
        worker.moves.advance(self.now)
        stats, deltas = None, []
        if step and worker.core.has_unfinished():
            deltas, stats = worker.core.step(self.now)
            worker.computed += 0 if stats is None else stats.num_tokens
            for delta in deltas:
                self.deliver(delta)
        stalled = step and stats is None and not deltas and worker.core.has_unfinished()
        worker.moves.advance(self.now, stalled)
        for news in worker.moves.take_news():
            assert unpack_from_core(pack(news)) == news
            self.hear(worker, news)
        worker.manager.check()

    def run(self, turns: int = 1000, each: Callable[[], None] = lambda: None) -> None:
        for _ in range(turns):
            for worker in self.workers.values():
                self.turn(worker)
            each()
            self.now += 0.3
            if all(map(self.ended, self.adds)) and not self.busy:
                return
        raise AssertionError(f"not done after {turns} turns")

    @property
    def busy(self) -> bool:
        return any(
            worker.moves.busy or worker.inbox or worker.core.has_unfinished()
            for worker in self.workers.values()
        )

    @property
    def busy_moving(self) -> bool:
        return any(worker.moves.busy or worker.inbox for worker in self.workers.values())

    def hear(self, worker: Worker, news: MoveNews) -> None:
        match news:
            case ToPeer(to, frame):
                if to in self.workers and not self.lose():
                    self.order(to, FromPeer(worker.name, frame))
            case Complete(request, epoch, counts, ended):
                self.act(self.fence.complete(MoveId(request, epoch), counts, ended))
            case MoveFailed():
                self.failed.append(news)
                self.act(self.fence.move_failed(MoveId(news.request_id, news.epoch), worker.name))

    def deliver(self, delta: Delta) -> None:
        move = split_owned_id(delta.request_id)
        owner = self.fence.owner(move.request)
        ended = delta.finish_reason is not None
        tokens, end, verdicts = self.fence.deliver(move, delta.sample, delta.token_ids, ended)
        if owner is not None and owner.epoch == move.epoch:
            self.deltas[move.request].append(delta)
            self.show(move.request, delta)
            assert tokens == delta.token_ids or not end
        self.act(verdicts)

    def show(self, request: str, delta: Delta) -> None:
        """What the front end makes of a delta of the owner."""

    def act(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            match verdict:
                case Raised(request, old, new):
                    self.moved.append(request)
                    self.order(new.worker, Own(request, new.epoch))
                    self.order(old.worker, Disown(request, old.epoch))
                    for abort in self.aborts:
                        if abort.request_id == request:
                            self.abort(new, abort)
                case Disowned(request, owner):
                    if owner.worker in self.workers:
                        self.order(owner.worker, Disown(request, owner.epoch))
                case Orphaned(request, tokens, ended):
                    worker = next(iter(self.workers))
                    add, move = self.adds[request], self.fence.resume(request, worker)
                    add = replace(add, request_id=move.owned_id)
                    outputs = [
                        Drawn(drawn, "stop" if over else None)
                        for drawn, over in zip(tokens, ended, strict=True)
                    ]
                    self.workers[worker].core.send(Resume(add, tuple(outputs)))

    def check_idle(self) -> None:
        for worker in self.workers.values():
            manager = worker.manager
            manager.check()
            assert manager.num_open_sequences == 0 and not manager.leases
            assert manager.num_held_blocks == manager.num_draining_blocks == 0
            assert not worker.core.request_ids and not worker.moves.busy
