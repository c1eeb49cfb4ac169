"""A worker of a simulated cluster: the real loop, whose steps take time on a common clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagedkv.engine.core import EngineCore
from pagedkv.engine.moves import Moves
from pagedkv.engine.wire import (
    Complete,
    Disown,
    FromPeer,
    Move,
    MoveFailed,
    MoveNews,
    Own,
    PeerGone,
    ToCore,
    ToPeer,
)
from pagedkv.scheduling.backlog import load_of
from pagedkv.scheduling.messages import Abort, Add, Delta, Resume
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.simulation.agenda import Agenda
from pagedkv.simulation.clock import VirtualClock
from pagedkv.simulation.executor import StepCost, TimedExecutor, step_of
from pagedkv.simulation.kv import NoKV, NoTransport, hello
from pagedkv.simulation.network import Network
from pagedkv.simulation.serve import Server
from pagedkv.tiers.names import Namer
from pagedkv.transfer.events import EventStream, decode_batch
from pagedkv.transfer.limits import TransferLimits
from pagedkv.transfer.messages import Data, Grant, split_owned_id, unpack
from pagedkv.transfer.roles import Service
from pagedkv.transfer.routing import Role, WorkerEvents, WorkerReport

_REPORT_SECONDS = 0.1  # between two reports to the router, if nothing has come
_MOST_MOVES = 32


class Listener(Protocol):
    """The front end and its router, as far as workers know them."""

    def deliver(self, deltas: Sequence[Delta]) -> None:
        """A step has ended; this is what it has brought."""
        ...

    def heard(self, worker: str, news: Complete | MoveFailed) -> None:
        """What has become of a move from or to the worker."""
        ...

    def tell_router(self, event: WorkerReport | WorkerEvents) -> None: ...

    def worker(self, name: str) -> Worker: ...


@dataclass(slots=True)
class MoveCounts:
    """What has been moved between all workers.

    received, failed: moves, as the front end counts them; see `cluster.dispatch.Counts`.
    blocks_sent: those in part included. tokens_there: not sent, for the receiver had them.
    """

    received: int = 0
    failed: int = 0
    blocks_sent: int = 0
    tokens_there: int = 0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the workers of a cluster have in common.

    token_bytes: of K/V, on a link. namer: of cached blocks, for the router; None: it is told
    nothing of them.
    """

    agenda: Agenda
    network: Network
    listener: Listener
    token_bytes: int
    limits: TransferLimits
    namer: Namer | None = None
    moved: MoveCounts = field(default_factory=MoveCounts)


class Worker:
    """Runs one step after the other while there is something to do; costs nothing while idle.

    A step decides with what has come before it starts, and brings something when it ends. What
    comes meanwhile, requests and messages, is looked at between two steps, as in an engine.
    service: what it is for, as the router is told. alive: else nothing happens to it any more.
    """

    def __init__(
        self, name: str, role: Role, server: Server, cost: StepCost, around: Surroundings
    ) -> None:
        self.name, self.service = name, Service(role)
        self.alive = True
        self._clock = VirtualClock()
        self._manager = manager = server.make_manager(_MOST_MOVES)
        self.core = EngineCore(
            Scheduler(manager, server.scheduling), TimedExecutor(self._clock, cost)
        )
        ours = hello(name, manager.block_size, manager.num_blocks)
        self.moves = Moves(self.core, NoKV(ours), NoTransport(), ours, around.limits)
        self.num_steps = self.num_requests = self.num_received = 0
        self.busy_seconds = 0.0
        self._around, self._agenda = around, around.agenda
        self._events = (
            None
            if around.namer is None
            else EventStream(manager.listen(), around.namer, manager.block_size, topic=name)
        )
        self._inbox: deque[ToCore] = deque()
        self._idle, self._ticking = True, False
        self._reported = 0.0
        self._seen: list[str] = []  # requests that have come since the last report
        budget, seats = server.scheduling.max_num_batched_tokens, server.scheduling.seats
        self._rate = budget / cost.seconds(step_of(0, 0, budget))
        self._step_seconds = cost.seconds(step_of(1, 1, 0))
        more = cost.seconds(step_of(seats, 1, 0)) - self._step_seconds
        self._step_each = more / max(1, seats - 1)

    @property
    def takes_decodes(self) -> bool:
        """Whether requests can move here."""
        return self.alive and self.service.takes_decodes

    # What comes in

    def send(self, message: ToCore) -> None:
        """From the front end or another worker; looked at between two steps."""
        if self.alive:
            self._inbox.append(message)
            self._wake()

    def ask_for_picture(self) -> None:
        """The router has missed events of the cache."""
        if self._events is not None:
            self._events.ask_for_picture()

    def drain(self, now: float) -> None:
        """It gets nothing new from now on."""
        self.service.draining = True
        self.report(now)

    def turn(self, role: Role, now: float) -> None:
        """Its role changes. What it has of the old one it finishes or gives away."""
        self.service.turn(role, now)
        self.report(now)

    def die(self) -> None:
        """With all that it has. What it has sent is on its way."""
        self.alive = False
        self._inbox.clear()

    def _take(self, message: ToCore, now: float) -> None:
        match message:
            case Move() | FromPeer() | Own() | Disown() | PeerGone():
                if isinstance(message, Own):
                    self.num_received += 1
                self.moves.handle(message, now)
            case Add() | Resume():
                self.num_requests += 1
                self._seen.append(split_owned_id(message.request_id).request)
                self.core.send(message)
            case Abort():
                self.core.send(message)

    # What goes out

    def _post(self, news: MoveNews) -> None:
        listener = self._around.listener
        match news:
            case ToPeer(to, frame):
                target, received = listener.worker(to), FromPeer(self.name, frame)
                self._around.network.send(
                    self.name, to, *self._size(frame), lambda now: target.send(received)
                )
            case Complete() | MoveFailed():
                listener.heard(self.name, news)

    def _size(self, frame: bytes) -> tuple[int, int]:
        """Bytes of a frame on a link with the K/V that it stands for, and in how many pieces."""
        moved, message = self._around.moved, unpack(frame)
        match message:
            case Grant():
                moved.tokens_there += message.have
                self._seen.append(message.request)  # its blocks are held from now on
            case Data():
                tokens = message.stop - message.start
                blocks = -(-tokens // self._manager.block_size)
                moved.blocks_sent += blocks
                return len(frame) + tokens * self._around.token_bytes, blocks
        return len(frame), 1

    # The loop

    def _wake(self) -> None:
        """There is something to be done between two steps: now, if none is being computed."""
        if self._idle and self.alive:
            self._idle = False
            self._agenda.at(self._agenda.now, self._turn)

    def _turn(self, now: float) -> None:
        """Between two steps."""
        if not self.alive:
            return
        self._move_on(now)
        due = self._seen or now >= self._reported + _REPORT_SECONDS
        if due:
            self.report(now)
        if self._go_on(now):
            return
        self._idle = True
        if self._inbox:  # what a report has brought, or a move that was given up
            self._wake()
        elif not due:  # the last word for some time
            self.report(now)
        if self.moves.busy and not self._ticking:
            self._ticking = True
            self._agenda.at(now + self.moves.pause, self._tick)

    def _move_on(self, now: float, stalled: bool = False) -> None:
        """Takes all that has come, and goes on with moves."""
        moves, inbox = self.moves, self._inbox
        while True:
            while inbox:
                self._take(inbox.popleft(), now)
            if moves.busy:
                moves.advance(now, stalled)
            for news in moves.take_news():
                self._post(news)
            if not inbox:
                return

    def _go_on(self, now: float) -> bool:
        """Starts a step; False: there is nothing to do, or no room for it."""
        if not self.core.has_unfinished():
            return False
        if self._step(now):
            return True
        if not self.moves.busy:
            return False
        self._move_on(now, stalled=True)
        return self._step(now)

    def _step(self, now: float) -> bool:
        self._clock.now = now
        deltas, stats = self.core.step(now)
        end = self._clock.now
        if stats is None and not deltas:
            return False
        if stats is not None:
            self.num_steps += 1
            self.busy_seconds += end - now
            if stats.num_tokens == stats.num_running:
                self._step_seconds = stats.duration

        def finish(now: float) -> None:
            if self.alive:
                self._around.listener.deliver(deltas)
                self._turn(now)

        self._agenda.at(end, finish)
        return True

    def _tick(self, now: float) -> None:
        self._ticking = False
        self._wake()

    def report(self, now: float = 0.0) -> None:
        """Tells the router how things are: when something has come, or a few times a second."""
        self._reported = now
        listener = self._around.listener
        if self._events is not None:
            frames = self._events.poll(now)
            if frames is not None:
                seq = int.from_bytes(frames.seq)
                listener.tell_router(WorkerEvents(self.name, seq, decode_batch(frames.payload)))
        seen, self._seen = tuple(self._seen), []
        listener.tell_router(self._state(seen))

    def _state(self, seen: tuple[str, ...]) -> WorkerReport:
        scheduler, manager = self.core.scheduler, self._manager
        load = load_of(scheduler.roster, scheduler.config)
        growth = load.decodes * load.output / 2 + load.prefill_tokens
        excess = max(0.0, load.samples - load.places)
        return WorkerReport(
            worker=self.name,
            role=self.service.role,
            num_blocks=manager.num_blocks,
            free_blocks=manager.num_free_blocks + manager.num_cached_blocks,
            prefill_tokens_per_s=self._rate,
            promised_blocks=int(growth / manager.block_size),
            wait_s=excess * self._step_seconds * load.output / load.places,
            queued_tokens=load.prefill_tokens,
            running=load.decodes,
            step_s=self._step_seconds,
            step_s_per_sequence=self._step_each,
            draining=not self.service.takes_new,
            seen=seen,
        )
