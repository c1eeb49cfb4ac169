"""A worker of a simulated cluster: the real loop, whose steps take time on a common clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagedkv.engine.core import EngineCore
from pagedkv.scheduling.backlog import load_of
from pagedkv.scheduling.messages import Add, Delta, Resume
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.simulation.agenda import Action, Agenda
from pagedkv.simulation.clock import VirtualClock
from pagedkv.simulation.closed_form import step_of
from pagedkv.simulation.executor import StepCost, TimedExecutor
from pagedkv.simulation.mover import Mover
from pagedkv.simulation.network import Network
from pagedkv.simulation.serve import Server
from pagedkv.tiers.names import Namer
from pagedkv.transfer.events import EventStream, decode_batch
from pagedkv.transfer.limits import TransferLimits
from pagedkv.transfer.messages import Message, MoveId
from pagedkv.transfer.routing import Role, WorkerEvents, WorkerReport

_REPORT_SECONDS = 0.1  # between two reports to the router, if nothing has come


class Listener(Protocol):
    """The front end and its router, as far as workers know them."""

    def deliver(self, worker: Worker, deltas: Sequence[Delta]) -> None:
        """A step has ended; this is what it has brought."""
        ...

    def completed(
        self, worker: Worker, move: MoveId, counts: tuple[int, ...], ended: tuple[bool, ...]
    ) -> None:
        """All of a request has come to the worker."""
        ...

    def failed(self, worker: Worker, move: MoveId, reason: str) -> None:
        """A move from or to the worker has failed."""
        ...

    def tell_router(self, event: WorkerReport | WorkerEvents) -> None: ...

    def worker(self, name: str) -> Worker: ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the workers of a cluster have in common.

    parked: requests between two workers, by move. namer: of cached blocks, for the router; None: it
    is told nothing of them.
    """

    agenda: Agenda
    network: Network
    listener: Listener
    token_bytes: int
    limits: TransferLimits
    namer: Namer | None = None
    parked: dict[MoveId, Resume] = field(default_factory=dict)


class Worker:
    """Runs one step after the other while there is something to do; costs nothing while idle.

    A step decides with what has come before it starts, and brings something when it ends. What
    comes meanwhile, requests and messages, is looked at between two steps, as in an engine.
    """

    def __init__(
        self, name: str, role: Role, server: Server, cost: StepCost, around: Surroundings
    ) -> None:
        self.name, self.role = name, role
        self._clock = VirtualClock()
        self._manager = manager = server.make_manager()
        self.core = EngineCore(
            Scheduler(manager, server.scheduling), TimedExecutor(self._clock, cost)
        )
        self.mover = Mover(name, self.core, around.token_bytes, around.limits, self, around.parked)
        self.num_steps = self.num_requests = 0
        self.busy_seconds = 0.0
        self._around, self._agenda = around, around.agenda
        self._events = (
            None
            if around.namer is None
            else EventStream(manager.listen(), around.namer, manager.block_size, topic=name)
        )
        self._inbox: deque[Action] = deque()
        self._idle, self._ticking = True, False
        self._reported = 0.0
        self._seen: list[str] = []  # requests that have come since the last report
        budget, seats = server.scheduling.max_num_batched_tokens, server.scheduling.seats
        self._rate = budget / cost.seconds(step_of(0, 0, budget))
        self._step_seconds = cost.seconds(step_of(1, 1, 0))
        more = cost.seconds(step_of(seats, 1, 0)) - self._step_seconds
        self._step_each = more / max(1, seats - 1)

    # What comes in

    def add(
        self, add: Add, request: str, to: str | None = None, move: MoveId | None = None
    ) -> None:
        """A request; with `move` it is to go on at worker `to` once it is prefilled."""
        self.num_requests += 1

        def enter(now: float) -> None:
            self._seen.append(request)
            self.core.send(add)
            if to is not None and move is not None:
                self.mover.start(add, move, to, self._manager.block_size, now)

        self._look_at(enter)

    def receive(self, worker: str, message: Message) -> None:
        """A message of another worker has arrived."""
        self._look_at(lambda now: self.mover.handle(worker, message, now))

    def own(self, move: MoveId) -> None:
        """The front end has made this worker the owner of a request."""
        self._look_at(lambda now: self.mover.own(move, now))

    def disown(self, move: MoveId) -> None:
        """The front end has no use for a copy."""
        self._look_at(lambda now: self.mover.disown(move, "the front end does not want it", now))

    def ask_for_picture(self) -> None:
        """The router has missed events of the cache."""
        if self._events is not None:
            self._events.ask_for_picture()

    # What goes out: a MoverHost

    def post(self, to: str, message: Message, num_bytes: int, pieces: int) -> None:
        target = self._around.listener.worker(to)
        self._around.network.send(
            self.name, to, num_bytes, pieces, lambda now: target.receive(self.name, message)
        )

    def completed(self, move: MoveId, counts: tuple[int, ...], ended: tuple[bool, ...]) -> None:
        self._around.listener.completed(self, move, counts, ended)

    def failed(self, move: MoveId, reason: str) -> None:
        self._around.listener.failed(self, move, reason)

    # The loop

    def _look_at(self, action: Action) -> None:
        """Notes what is to be done between two steps: now, if none is being computed."""
        self._inbox.append(action)
        if self._idle:
            self._idle = False
            self._agenda.at(self._agenda.now, self._turn)

    def _turn(self, now: float) -> None:
        """Between two steps."""
        while self._inbox:
            self._inbox.popleft()(now)
        if self.mover.busy and not self._ticking:
            self._ticking = True
            self._agenda.at(now + self._around.limits.retry / 2, self._tick)
        due = self._seen or self.mover.granted or now >= self._reported + _REPORT_SECONDS
        if due:
            self.report(now)
        self._idle = not (self.core.has_unfinished() and self._step(now))
        if self._idle and not due:  # the last word for some time
            self.report(now)

    def _step(self, now: float) -> bool:
        """Starts a step; False: what waits has no room, messages or time will bring it."""
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
            self._around.listener.deliver(self, deltas)
            self.mover.stepped(now)
            self._turn(now)

        self._agenda.at(end, finish)
        return True

    def _tick(self, now: float) -> None:
        self._ticking = False
        self._look_at(self.mover.tick)

    def report(self, now: float = 0.0) -> None:
        """Tells the router how things are: when something has come, or a few times a second."""
        self._reported = now
        listener = self._around.listener
        if self._events is not None:
            frames = self._events.poll(now)
            if frames is not None:
                seq = int.from_bytes(frames.seq)
                listener.tell_router(WorkerEvents(self.name, seq, decode_batch(frames.payload)))
        scheduler, manager = self.core.scheduler, self._manager
        load = load_of(scheduler.roster, scheduler.config)
        size = manager.block_size
        growth = load.decodes * load.output / 2 + load.prefill_tokens
        excess = max(0.0, load.samples - load.places)
        listener.tell_router(
            WorkerReport(
                worker=self.name,
                role=self.role,
                num_blocks=manager.num_blocks,
                free_blocks=manager.num_free_blocks + manager.num_cached_blocks,
                prefill_tokens_per_s=self._rate,
                promised_blocks=int(growth / size),
                wait_s=excess * self._step_seconds * load.output / load.places,
                queued_tokens=load.prefill_tokens,
                running=load.decodes,
                step_s=self._step_seconds,
                step_s_per_sequence=self._step_each,
                seen=(*self._seen, *self.mover.granted),
            )
        )
        self._seen.clear()
        self.mover.granted.clear()
