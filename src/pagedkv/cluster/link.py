"""The front end's way to many workers, as if they were one core: see `server.core_link.CoreLink`.

Everything belongs to one event loop. Requests go to workers that the router names; what these bring
comes back under the front end's own ids, through the fence of `dispatch`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from pagedkv.cluster.actors import Actors, Plan
from pagedkv.cluster.applied import Applied
from pagedkv.cluster.dispatch import Dispatch, Outcome
from pagedkv.cluster.questions import Questions
from pagedkv.cluster.router_actor import Wish
from pagedkv.cluster.seats import Seat
from pagedkv.cluster.totals import total_counters, total_facts, total_status
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
    Own,
    PeerGone,
    Ready,
    ToCore,
)
from pagedkv.errors import PagedKVError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.counters import EngineCounters
from pagedkv.scheduling.messages import Abort, Add, Delta, Drain, Message, Resume, StepStats
from pagedkv.scheduling.namespaces import namespace_bytes, public_length
from pagedkv.transfer.routing import Assign, RouterConfig, Shed

_LOG = logging.getLogger("pagedkv.cluster")
# Seconds that a request waits for a router or a worker that Ray is starting again.
PATIENCE = 120.0
# Seconds between two looks at requests that should be elsewhere.
_LOOK = 0.25
# Tokens of output that a worker is to have room for when it gets a request, at most.
_HEADROOM = 256


class ClusterLink:
    """A CoreLink to the workers of a plan. clock: seconds, that of the requests' arrivals."""

    def __init__(
        self,
        plan: Plan,
        clock: Callable[[], float] = time.monotonic,
        patience: float = PATIENCE,
    ) -> None:
        self._clock, self._patience = clock, patience
        self._actors = Actors(plan, self)
        self._seats = {name: Seat(name, role) for name, role in plan.roles.items()}
        self._dispatch = Dispatch(clock)
        self._applied = Applied()
        self._numbers: dict[str, int] = {}  # of Adds that no worker has got yet
        self._since: dict[str, float] = {}  # when a request began to want a worker
        self._questions = Questions(self._post)
        self._frames: asyncio.Queue[FromCore] = asyncio.Queue()
        self._facts: Facts | None = None
        self._past: list[EngineCounters] = []  # of processes that are gone, added up
        self._draining = False
        self._outbox: dict[str, list[ToCore]] = {}
        self._wishes: list[str] = []
        self._ended: list[str] = []
        self._flushing = False
        self._router_up = False
        self._cluster = ClusterStatus(())
        self._tasks: list[asyncio.Task[None]] = []

    # ---- CoreLink -----------------------------------------------------------------------------

    async def start(self) -> None:
        try:
            await self._actors.start()
        except PagedKVError as error:
            self._post(Died(type(error).__name__, str(error)))
            return
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
                for name in self._ready():
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
                _LOG.info("request %s was not moved: %s", request, reason)
                failed = self._cluster.moves_failed + 1
                self._cluster = replace(self._cluster, moves_failed=failed)
                self._carry_out(self._dispatch.fail_move(worker, frame))

    def lost(self, worker: str, kind: str, why: str) -> bool:
        if self._facts is None:  # it is about what was asked for, or about this machine
            self._post(Died(kind, f"{worker}: {why}"))
            return False
        _LOG.warning("worker %s is gone and is started again: %s", worker, why)
        seat = self._seats[worker]
        if seat.status is not None:
            self._past = [total_counters([*self._past, seat.status.counters])]
        seat.end()
        self._outbox.pop(worker, None)
        self._applied.lost(worker)
        self._questions.lost(worker)
        for other in self._ready():
            self._send(other, PeerGone(worker))
        self._carry_out(self._dispatch.lose(worker, why), always=True)
        return True

    def routed(self, up: bool) -> None:
        self._router_up = up
        if up:  # it may never have heard of them
            self._tell_drained()
            self._want(self._dispatch.unplaced)

    def broken(self, error: BaseException) -> None:
        self._post(Died(type(error).__name__, str(error)))

    def decided(self, decisions: Sequence[Assign | Shed]) -> None:
        for decision in decisions:
            match decision:
                case Assign(request, prefill, decode):
                    self._assigned(request, prefill, decode)
                case Shed(request, reason):
                    if self._dispatch.is_unplaced(request):
                        self._carry_out(self._dispatch.give_up(request, reason, "overload"))

    # ---- steps --------------------------------------------------------------------------------

    def _ready(self) -> list[str]:
        return [name for name, seat in self._seats.items() if seat.ready]

    def _ready_now(self, seat: Seat, facts: Facts) -> None:
        seat.facts = facts
        if self._facts is not None:
            self._again(seat)
            return
        if len(self._ready()) < len(self._seats):
            return
        try:
            self._facts = total_facts({name: s.facts for name, s in self._seats.items() if s.facts})
        except PagedKVError as error:
            self._post(Died(type(error).__name__, str(error)))
            return
        config = RouterConfig(self._facts.block_size, max(1, facts.kv_bytes_per_token))
        self._actors.route(config)
        self._post(Ready(self._facts))

    def _again(self, seat: Seat) -> None:
        """A worker was started again, maybe on another host."""
        others = {s.name: s.facts for s in self._seats.values() if s.facts and s is not seat}
        try:
            if seat.facts is not None:
                total_facts({**others, seat.name: seat.facts})
        except PagedKVError as error:
            _LOG.error("worker %s gets no requests: %s", seat.name, error)
            seat.facts = None
        self._post(self._batch([], None))

    def _assigned(self, request: str, prefill: str, decode: str) -> None:
        if request not in self._dispatch:
            return
        if not self._seats[prefill].ready:  # it was lost meanwhile
            self._actors.lose(prefill)  # its last report may have come after the news of its death
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
            self._count(message)
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

    def _count(self, message: ToCore) -> None:
        counted = self._cluster
        match message:
            case Own():
                self._cluster = replace(counted, moves_done=counted.moves_done + 1)
            case Resume():
                self._cluster = replace(counted, resumed=counted.resumed + 1)

    def _batch(self, deltas: Sequence[Delta], stats: StepStats | None) -> Batch:
        return Batch(tuple(deltas), stats, self._applied.count, self._total())

    def _total(self) -> CoreStatus | None:
        present = [seat.status for seat in self._seats.values() if seat.status is not None]
        if not present:
            return None
        loads = tuple(seat.load(len(self._dispatch.of(seat.name))) for seat in self._seats.values())
        cluster = replace(self._cluster, workers=loads)
        return total_status(present, self._past, self._draining, cluster)

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
            config = self._facts.config
            self._actors.wish([self._wish(request, config) for request in wanted])

    def _wish(self, request: str, config: SchedulerConfig) -> Wish:
        add, drawn = self._dispatch.wanted(request)
        tokens = np.array([*add.prompt, *drawn], "<i4")
        room = max(1, config.max_model_len - len(tokens))
        most = min(add.params.max_tokens or room, room, _HEADROOM)
        due = [add.arrival + add.ttft_slo] if add.ttft_slo is not None and not drawn else []
        due += [] if add.deadline is None else [add.deadline]
        public = public_length(add.prompt, config.public_prefixes)
        return Wish(
            request,
            tokens.tobytes(),
            most * add.params.n,
            namespace_bytes(add.tenant, add.cache_salt),
            public if add.params.prompt_logprobs is None else 0,
            min(due) - self._clock() if due and config.overload == "reject" else None,
            None,
            add.priority,
        )

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK, self._patience / 4))
            self._give_up_late()
            for seat in self._seats.values():
                if seat.draining or seat.role == "prefill":
                    self._move_away(seat)

    def _give_up_late(self) -> None:
        """Requests that nobody can take for too long end with an error."""
        missing, now = self._missing(), self._clock()
        if missing is None:
            self._since = dict.fromkeys(self._since, now)
        late = [request for request, since in self._since.items() if since < now - self._patience]
        for request in late:
            error = f"{missing}, and was not for {self._patience:g} s: try again later"
            self._carry_out(self._dispatch.give_up(request, error, "engine"))

    def _move_away(self, seat: Seat) -> None:
        """What decodes at a worker that is drained, or was left at one that only prefills."""
        others = [s for s in self._seats.values() if s.takes_decodes and s is not seat]
        if not others:
            return
        load = {other.name: len(self._dispatch.of(other.name)) for other in others}
        for request in self._dispatch.settled(seat.name):
            to = min(load, key=lambda name: (load[name], name))
            load[to] += 1
            self._carry_out(self._dispatch.move_away(request, to))

    def _missing(self) -> str | None:
        """What has to come back before a request can be placed."""
        if not self._router_up:
            return "the router is not there"
        roles = {seat.role for seat in self._seats.values() if seat.ready}
        for role in ("prefill", "decode"):
            if not roles & {role, "both"}:
                return f"no {role} worker is there"
        return None

    def _post(self, frame: FromCore) -> None:
        self._frames.put_nowait(frame)

    # ---- questions ----------------------------------------------------------------------------

    def _ask(self, ask: Ask) -> None:
        match ask.kind:
            case "workers":
                self._post(Answer(ask.id, [self._describe(seat) for seat in self._seats.values()]))
            case "drain" | "undrain":
                self._drain(ask)
            case _:
                for worker, question in self._questions.put(ask, self._ready()):
                    self._send(worker, question)

    def _describe(self, seat: Seat) -> dict[str, Any]:
        """For operators, as plain values."""
        load = asdict(seat.load(len(self._dispatch.of(seat.name))))
        return {**load, "pid": None if seat.started is None else seat.started.pid}

    def _drain(self, ask: Ask) -> None:
        """A worker gets nothing new, and what it has moves away; or it is as before."""
        seat = self._seats.get(ask.argument)
        if seat is None:
            known = ", ".join(self._seats)
            error = f"there is no worker {ask.argument!r:.100}: there are {known}"
            self._post(Answer(ask.id, error=error))
            return
        rest = [s for s in self._seats.values() if s.role == seat.role and s is not seat]
        if ask.kind == "drain" and not any(s.ready and not s.draining for s in rest):
            error = f"{seat.name} is the last worker of its role: nobody could take its requests"
            self._post(Answer(ask.id, error=error))
            return
        seat.draining = ask.kind == "drain"
        self._tell_drained()
        if seat.draining:
            self._move_away(seat)
        self._post(Answer(ask.id, self._describe(seat)))

    def _tell_drained(self) -> None:
        self._actors.drain([seat.name for seat in self._seats.values() if seat.draining])
