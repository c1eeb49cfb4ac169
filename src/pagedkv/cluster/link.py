"""The front end's way to many workers, as if they were one core: see `server.core_link.CoreLink`.

Everything belongs to one event loop. Requests go to workers that the router names; what these bring
comes back under the front end's own ids, through the fence of `dispatch`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from pagedkv.cluster.actors import Actors, Plan
from pagedkv.cluster.applied import Applied
from pagedkv.cluster.dispatch import MOST_LOSSES, Dispatch
from pagedkv.cluster.figures import Figures
from pagedkv.cluster.outcome import Outcome
from pagedkv.cluster.questions import Questions
from pagedkv.cluster.router_messages import make_wish
from pagedkv.cluster.seats import Seat, Seats
from pagedkv.cluster.totals import check_alike, total_facts
from pagedkv.cluster.worker import Started
from pagedkv.engine.facts import Facts
from pagedkv.engine.status import ClusterStatus, CoreStatus
from pagedkv.engine.wire import (
    Answer,
    Ask,
    Batch,
    Close,
    Complete,
    Died,
    FromCore,
    MoveFailed,
    PeerGone,
    Ready,
    ToCore,
)
from pagedkv.errors import PagedKVError
from pagedkv.scheduling.messages import Abort, Add, Delta, Drain, Message, StepStats
from pagedkv.transfer.roles import flip_config
from pagedkv.transfer.routing import Assign, Role, RouterConfig, RouterStats, SetRole, Shed

_LOG = logging.getLogger("pagedkv.cluster")
# Seconds that a request waits for a router or a worker that Ray is starting again.
PATIENCE = 120.0
# Seconds between two looks at requests that should be elsewhere.
_LOOK = 0.25


class ClusterLink:
    """A CoreLink to the workers of a plan. clock: seconds, that of the requests' arrivals."""

    def __init__(
        self,
        plan: Plan,
        clock: Callable[[], float] = time.monotonic,
        patience: float = PATIENCE,
    ) -> None:
        self._clock, self._patience = clock, patience
        self._flip = None if plan.flip_after is None else flip_config(plan.flip_after)
        self._actors = Actors(plan, self)
        self._seats = Seats(plan.roles)
        self._dispatch = Dispatch(clock)
        self._applied = Applied()
        self._numbers: dict[str, int] = {}  # of Adds that no worker has got yet
        self._since: dict[str, float] = {}  # when a request began to want a worker
        self._questions = Questions(self._post)
        self._frames: asyncio.Queue[FromCore] = asyncio.Queue()
        self._facts: Facts | None = None
        self._example: tuple[str, Facts] | None = None  # a worker, and what all have to be like
        self._figures = Figures()
        self._draining = False
        self._outbox: dict[str, list[ToCore]] = {}
        self._wishes: list[str] = []
        self._ended: list[str] = []
        self._flushing = False
        self._router_up = False
        self._router_losses = 0  # since the last decision
        self._tasks: list[asyncio.Task[None]] = []

    # ---- CoreLink -----------------------------------------------------------------------------

    async def start(self) -> None:
        await self._actors.start()
        self._tasks.append(asyncio.create_task(self._watch()))

    def send(self, message: ToCore) -> None:
        match message:
            case Add():
                self._numbers[message.request_id] = self._applied.begin()
                self._carry_out(self._dispatch.add(message))
            case Abort():
                number = self._applied.begin()
                self._carry_out(self._dispatch.abort(message), number)
                self._applied.done(number)
            case Drain():  # not theirs: what is here is still to be placed, moved and resumed
                self._draining = True
                self._applied.done(self._applied.begin())
            case Ask():
                self._ask(message)
            case Close():
                for name in self._seats.ready:
                    self._send(name, message)

    async def receive(self) -> FromCore:
        return await self._frames.get()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._actors.close()
        self._post(Died("Close", "the workers were closed"))

    def kill(self) -> None:
        self._actors.kill()

    # ---- what the actors say ------------------------------------------------------------------

    def up(self, worker: str, started: Started) -> None:
        self._seats[worker].begin(started, self._clock())

    def shows(self, worker: str, now: float) -> None:
        self._seats[worker].shows(now, self._clock())

    def came(self, worker: str, frame: FromCore) -> None:
        seat = self._seats[worker]
        match frame:
            case Ready(facts):
                self._ready_now(seat, facts)
            case Batch():
                seat.status = frame.status or seat.status
                self._applied.taken(worker, frame.applied)
                deltas = [seat.on_our_clock(delta) for delta in frame.deltas]
                self._carry_out(self._dispatch.take(deltas), stats=frame.stats, always=True)
            case Answer():
                self._questions.answered(worker, seat.answer_on_our_clock(frame))
            case Complete():
                self._carry_out(self._dispatch.complete(frame))
            case MoveFailed(request, _, reason):
                if not frame.ended:
                    _LOG.info("request %s was not moved: %s", request, reason)
                self._carry_out(self._dispatch.fail_move(worker, frame))

    def lost(self, worker: str, kind: str, why: str) -> bool:
        if self._facts is None:  # it is about what was asked for, or about this machine
            self._post(Died(kind, f"{worker}: {why}"))
            return False
        seat = self._seats[worker]
        self._figures.ended(seat.status)
        seat.end()
        self._tell_duties()
        self._outbox.pop(worker, None)
        self._applied.lost(worker)
        self._questions.lost(worker)
        for other in self._seats.ready:
            self._send(other, PeerGone(worker))
        outcome = self._dispatch.lose(worker, why)
        _LOG.warning(
            "worker %s is gone: %s; it is started again, %d requests go on elsewhere, %d end",
            worker,
            why,
            len(outcome.unplaced),
            len(outcome.closed),
        )
        self._carry_out(outcome, always=True)
        return True

    def routed(self, up: bool, why: str = "") -> None:
        self._router_up = up
        self._figures.new_router()
        if not up:
            self._lost_router(why)
        if self._facts is not None:
            self._post(self._batch([], None))
        if up:  # it may never have heard of them
            self._tell_duties()
            self._want(self._dispatch.unplaced)

    def broken(self, error: BaseException) -> None:
        self._post(Died(type(error).__name__, str(error)))

    def decided(self, decisions: Sequence[Assign | Shed | SetRole], stats: RouterStats) -> None:
        self._figures.routing(stats)
        if decisions:
            self._router_losses = 0
        for decision in decisions:
            match decision:
                case Assign(request, prefill, decode):
                    self._assigned(request, prefill, decode)
                case Shed(request, reason):
                    if self._dispatch.is_unplaced(request):
                        self._carry_out(self._dispatch.give_up(request, reason, "overload"))
                case SetRole(worker, role):
                    self._turn(self._seats[worker], role)
        if not decisions and self._facts is not None:  # the counts are to be seen
            self._post(self._batch([], None))

    # ---- steps --------------------------------------------------------------------------------

    def _ready_now(self, seat: Seat, facts: Facts) -> None:
        if self._example is not None:
            check_alike(seat.name, facts, *self._example)
            seat.facts = facts
            self._tell_duties()
            self._post(self._batch([], None))
            return
        seat.facts = facts
        if len(self._seats.ready) < len(self._seats):
            return
        try:
            self._facts = total_facts({s.name: s.facts for s in self._seats if s.facts})
        except PagedKVError as error:
            self._post(Died(type(error).__name__, str(error)))
            return
        self._example = seat.name, facts
        size, per_token = self._facts.block_size, max(1, facts.kv_bytes_per_token)
        self._actors.route(RouterConfig(size, per_token, flip=self._flip))
        self._post(Ready(self._facts))

    def _assigned(self, request: str, prefill: str, decode: str) -> None:
        if request not in self._dispatch:
            return
        if not self._seats[prefill].ready:  # it was lost meanwhile
            self._want([request])
            return
        number = self._numbers.pop(request, None)
        then = decode if self._seats[decode].ready else None
        self._carry_out(self._dispatch.place(request, prefill, then), number)
        if number is not None:
            self._applied.done(number)
        self._since.pop(request, None)

    def _carry_out(
        self,
        outcome: Outcome,
        number: int | None = None,
        stats: StepStats | None = None,
        always: bool = False,
    ) -> None:
        """number: of the front end's message from which it follows. always: a Batch, even empty."""
        for worker, message in outcome.sends:
            self._send(worker, message, number)
        self._want(outcome.unplaced)
        for request in outcome.closed:
            self._since.pop(request, None)
            waiting = self._numbers.pop(request, None)
            if waiting is not None:
                self._applied.done(waiting)
        self._ended += outcome.closed
        if outcome.closed:
            self._flush_soon()
        if outcome.deltas or (always and self._facts is not None):
            self._post(self._batch(outcome.deltas, stats))

    def _batch(self, deltas: Sequence[Delta], stats: StepStats | None) -> Batch:
        return Batch(tuple(deltas), stats, self._applied.count, self._total())

    def _total(self) -> CoreStatus | None:
        loads = tuple(seat.load(len(self._dispatch.of(seat.name))) for seat in self._seats)
        counts = asdict(self._dispatch.tally)
        cluster = ClusterStatus(loads, **counts, missing=self._missing, unplaced=len(self._since))
        return self._figures.update(self._seats, self._draining, cluster)

    @property
    def _missing(self) -> str | None:
        return self._seats.missing if self._router_up else "the router is not there"

    def _want(self, requests: Sequence[str]) -> None:
        """The router is asked for workers."""
        for request in requests:
            self._since.setdefault(request, self._clock())
        self._wishes += requests
        if requests:
            self._flush_soon()

    def _send(self, worker: str, message: ToCore, number: int | None = None) -> None:
        if isinstance(message, Message):
            self._applied.sent(worker, number)
        self._outbox.setdefault(worker, []).append(self._seats[worker].on_its_clock(message))
        self._flush_soon()

    def _flush_soon(self) -> None:
        """What comes up at once goes out together."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        outbox, self._outbox = self._outbox, {}
        for worker, messages in outbox.items():
            self._actors.send(worker, messages)
        ended, self._ended = self._ended, []
        wishes, self._wishes = self._wishes, []
        if self._router_up and ended:
            self._actors.end(ended)
        wanted = [request for request in wishes if request in self._dispatch]
        if self._router_up and self._facts is not None and wanted:
            config, now = self._facts.config, self._clock()
            self._actors.wish([make_wish(*self._dispatch.wanted(r), config, now) for r in wanted])

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK, self._patience / 4))
            self._give_up_late()
            self._look_at_seats()
            self._tell_who_waits()

    def _tell_who_waits(self) -> None:
        """Nobody else does where no worker brings anything."""
        newest = self._figures.newest
        told = None if newest is None else newest.cluster
        if told is not None and told.unplaced != len(self._since):
            self._post(self._batch([], None))

    def _look_at_seats(self) -> None:
        for seat in self._seats:
            if seat.service.gives_away:
                self._move_away(seat)
            else:
                seat.stuck = None
            if seat.service.end_turn(self._clock(), busy=bool(self._dispatch.of(seat.name))):
                self._tell_duties()

    def _turn(self, seat: Seat, role: Role) -> None:
        """The router wants the role of a worker to be another one."""
        if not seat.takes_new or not self._seats.can_spare(seat):  # it knew less than is known here
            self._actors.lose(seat.name)  # or it would wait for a worker of that role
            return
        old = seat.service.role
        _LOG.info("worker %s: %s -> %s, of which there are too few", seat.name, old, role)
        seat.service.turn(role, self._clock())
        self._tell_duties()
        self._look_at_seats()

    def _give_up_late(self) -> None:
        """Requests that nobody takes in time, or for too long, end with an error."""
        self._carry_out(self._dispatch.expire())
        missing, now = self._missing, self._clock()
        if missing is None:
            self._since = dict.fromkeys(self._since, now)
        late = [request for request, since in self._since.items() if since < now - self._patience]
        for request in late:
            error = f"{missing}, and was not for {self._patience:g} s: try again later"
            self._carry_out(self._dispatch.give_up(request, error, "engine"))

    def _lost_router(self, why: str) -> None:
        """After some in a row that decided nothing, a request that waits may be what ends them."""
        self._router_losses += 1
        if self._router_losses < MOST_LOSSES:
            return
        error = f"{self._router_losses} routers in a row have failed, the last: {why}"
        self._router_losses = 0
        for request in self._dispatch.unplaced:
            self._carry_out(self._dispatch.give_up(request, error, "engine"))

    def _move_away(self, seat: Seat) -> None:
        """What decodes at a worker that is drained, or was left at one that only prefills."""
        others = [s.name for s in self._seats if s.takes_decodes and s is not seat]
        self._carry_out(self._dispatch.empty(seat.name, others))
        stuck = self._dispatch.stuck(seat.name)
        if not others and self._dispatch.settled(seat.name):
            stuck = "no other worker takes requests"
        if stuck is not None and stuck != seat.stuck:
            _LOG.warning("requests stay at worker %s: %s", seat.name, stuck)
        seat.stuck = stuck

    def _post(self, frame: FromCore) -> None:
        self._frames.put_nowait(frame)

    # ---- questions ----------------------------------------------------------------------------

    def _ask(self, ask: Ask) -> None:
        match ask.kind:
            case "workers":
                self._post(Answer(ask.id, [self._describe(seat) for seat in self._seats]))
            case "drain" | "undrain":
                self._drain(ask)
            case _:
                for worker, question in self._questions.put(ask, self._seats.ready):
                    self._send(worker, question)

    def _describe(self, seat: Seat) -> dict[str, Any]:
        """For operators, as plain values."""
        load = asdict(seat.load(len(self._dispatch.of(seat.name))))
        return {**load, "pid": None if seat.started is None else seat.started.pid}

    def _drain(self, ask: Ask) -> None:
        """A worker gets nothing new, and what it has moves away; or it is as before."""
        if ask.argument not in self._seats.names:
            known = ", ".join(self._seats.names)
            error = f"there is no worker {ask.argument!r:.100}: there are {known}"
            self._post(Answer(ask.id, error=error))
            return
        seat = self._seats[ask.argument]
        if ask.kind == "drain" and not self._seats.can_spare(seat):
            error = f"{seat.name} is the last worker of its role: nobody could take its requests"
            self._post(Answer(ask.id, error=error))
            return
        seat.service.draining = ask.kind == "drain"
        self._tell_duties()
        if seat.service.draining:
            self._move_away(seat)
        self._post(self._batch([], None))  # what is missing may be another thing now
        self._post(Answer(ask.id, self._describe(seat)))

    def _tell_duties(self) -> None:
        self._actors.assign(self._seats.duties)
