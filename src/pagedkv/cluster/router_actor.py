"""The router as an actor: told by workers and the front end, asked by the front end alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np

from pagedkv.cache.index import make_frames
from pagedkv.cluster.in_order import InOrder, when_late
from pagedkv.cluster.reporter import NAMES
from pagedkv.cluster.router_messages import Duty, Turn, Wish
from pagedkv.errors import PagedKVError
from pagedkv.tiers.names import Namer
from pagedkv.transfer.events import decode_batch
from pagedkv.transfer.router import Router
from pagedkv.transfer.routing import (
    Arrival,
    AskForPicture,
    Assign,
    Decision,
    Ended,
    RouterConfig,
    RouterEvent,
    RouterStats,
    SetRole,
    Shed,
    Tick,
    WorkerEvents,
    WorkerGone,
    WorkerReport,
)

_TICK = 0.2  # seconds


class RouterActor:
    """Hosts a `transfer.router.Router`. It knows nothing when it starts, and is told soon.

    Nobody waits for what becomes of a call but of `decide`: that one raises what any has raised.
    The router is gone then, and another one is made by `begin`. What the front end tells is taken
    in the order of its turns: `end` must not come before the `arrive` of that request.
    """

    def __init__(self) -> None:
        self._workers: Mapping[str, Any] = {}
        self._router: Router | None = None
        self._session = 0  # none yet
        self._calls: InOrder[Callable[[], None]] = InOrder()
        self._namer = Namer(NAMES)
        self._duties: Mapping[str, Duty] = {}
        self._decisions: list[Assign | Shed | SetRole] = []
        self._news = asyncio.Event()
        self._failure: Exception | None = None
        self._told = RouterStats()
        self._ticking: asyncio.Task[None] | None = None

    async def begin(self, session: int, config: RouterConfig, workers: Mapping[str, Any]) -> None:
        """The front end is there. workers: actors by name. Nothing the second time.

        session: larger than any before.
        """
        if session <= self._session:
            return
        self._session, self._calls = session, InOrder()
        self._router, self._workers, self._failure = Router(config), workers, None
        self._decisions, self._told = [], RouterStats()
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())

    async def assign(self, turn: Turn, duties: Mapping[str, Duty]) -> None:
        """What the workers are for from now on, by name: the front end's to say, not theirs."""
        self._in_turn(turn, partial(self._assign, duties))

    async def arrive(self, turn: Turn, wishes: list[Wish]) -> None:
        """Requests want workers; `decide` answers. One that is told of twice counts once."""
        self._in_turn(turn, partial(self._arrive, wishes))

    async def end(self, turn: Turn, requests: list[str]) -> None:
        """Requests are over."""
        self._in_turn(turn, lambda: self._take(Ended(request) for request in requests))

    async def lose(self, turn: Turn, worker: str) -> None:
        """A worker is gone."""
        self._in_turn(turn, lambda: self._take([WorkerGone(worker)]))

    async def observe(
        self, boot: str, report: WorkerReport, events: list[tuple[int, bytes]]
    ) -> None:
        """From a process of a worker: how it is, and what its cache has done."""
        duty = self._duties.get(report.worker)
        if duty is not None and duty.boot == boot:
            self._take([self._on_duty(report)])
            self._take(WorkerEvents(report.worker, seq, decode_batch(it)) for seq, it in events)

    async def decide(self) -> tuple[list[Assign | Shed | SetRole], RouterStats]:
        """What was decided of requests and roles, and the router's counts since `begin`.

        Waits until something is decided, or counts have changed without that.
        """
        await self._news.wait()
        self._news.clear()
        if self._failure is not None:
            raise self._failure
        decisions, self._decisions = self._decisions, []
        if self._router is not None:
            self._told = self._router.stats()
        return decisions, self._told

    def _in_turn(self, turn: Turn, act: Callable[[], None]) -> None:
        """Calls of another session are dropped: they are about what is not known here any more."""
        if turn.session != self._session:
            return
        calls = self._calls
        for ready in calls.take(turn.number, act):
            ready()
        when_late(calls, lambda missing: self._give_up(calls, missing))

    def _give_up(self, calls: InOrder[Callable[[], None]], missing: str) -> None:
        """Without what did not come it is not known which requests there are."""
        if calls is self._calls:
            self._fail(PagedKVError(missing))

    def _assign(self, duties: Mapping[str, Duty]) -> None:
        before, self._duties = self._duties, duties
        reports = () if self._router is None else tuple(self._router.fleet.reports.values())
        for report in reports:
            stays = before[report.worker].boot == duties[report.worker].boot
            self._take([self._on_duty(report) if stays else WorkerGone(report.worker)])

    def _arrive(self, wishes: list[Wish]) -> None:
        if self._router is not None:
            self._take(self._arrivals(wishes, self._router.config.block_size))

    def _on_duty(self, report: WorkerReport) -> WorkerReport:
        duty = self._duties[report.worker]
        return msgspec.structs.replace(report, role=duty.role, draining=duty.draining)

    def _arrivals(self, wishes: list[Wish], size: int) -> Iterator[RouterEvent]:
        now = time.monotonic()
        for wish in wishes:
            tokens = np.frombuffer(wish.prompt, "<i4")
            frames = make_frames(wish.namespace, None)
            yield Ended(wish.request_id)
            yield Arrival(
                wish.request_id,
                len(tokens),
                wish.output_tokens,
                self._namer.walk(tokens, frames, wish.public // size, size),
                None if wish.slack is None else now + wish.slack,
                priority=wish.priority,
                tenant=wish.tenant,
                weight=wish.weight,
            )

    def _take(self, events: Iterable[RouterEvent]) -> None:
        """Nothing is known before the front end has come."""
        router = self._router
        if router is None:
            return
        try:
            for event in events:
                for decision in router.handle(event, time.monotonic()):
                    self._carry_out(decision)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._router, self._failure = None, error
        self._news.set()

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case AskForPicture(worker):
                self._workers[worker].tell_all.remote()
            case Assign() | Shed() | SetRole():
                self._decisions.append(decision)
                self._news.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            self._take([Tick()])
            if self._router is not None and self._router.stats() != self._told:
                self._news.set()
