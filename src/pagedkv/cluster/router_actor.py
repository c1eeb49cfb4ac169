"""The router as an actor: told by workers and the front end, asked by the front end alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from pagedkv.cache.index import make_frames
from pagedkv.cluster.reporter import NAMES
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
    Shed,
    Tick,
    WorkerEvents,
    WorkerGone,
    WorkerReport,
)

_TICK = 0.2  # seconds


class Wish(msgspec.Struct, frozen=True):
    """A request as the front end tells of it.

    prompt: int32 little-endian, with what was drawn already. namespace, public: as for
    `BlockManager.open`. slack: seconds until its first token is due. Else as `Arrival`.
    """

    request_id: str
    prompt: bytes
    output_tokens: int
    namespace: bytes | None = None
    public: int = 0
    slack: float | None = None
    tpot: float | None = None
    priority: int = 0


class RouterActor:
    """Hosts a `transfer.router.Router`. It knows nothing when it starts, and is told soon."""

    def __init__(self) -> None:
        self._workers: Mapping[str, Any] = {}
        self._router: Router | None = None
        self._namer = Namer(NAMES)
        self._draining: frozenset[str] = frozenset()
        self._decisions: list[Assign | Shed] = []
        self._news = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None

    async def begin(self, config: RouterConfig, workers: Mapping[str, Any]) -> None:
        """The front end is there. workers: actors by name."""
        self._router, self._workers = Router(config), workers
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())

    async def drain(self, draining: list[str]) -> None:
        """These get nothing new from now on, the others do."""
        self._draining = frozenset(draining)
        reports = () if self._router is None else tuple(self._router.fleet.reports.values())
        for report in reports:
            self._take(self._marked(report))

    async def arrive(self, wishes: list[Wish]) -> None:
        """Requests want workers; `decide` answers. One that is told of twice counts once."""
        if self._router is None:
            return
        now, config = time.monotonic(), self._router.config
        for wish in wishes:
            self._take(Ended(wish.request_id))
            self._take(self._arrival(wish, config.block_size, now))

    async def end(self, requests: list[str]) -> None:
        """Requests are over."""
        for request in requests:
            self._take(Ended(request))

    async def lose(self, worker: str) -> None:
        """A worker is gone."""
        self._take(WorkerGone(worker))

    async def observe(self, report: WorkerReport, events: list[tuple[int, bytes]]) -> None:
        """From a worker: how it is, and what its cache has done."""
        self._take(self._marked(report))
        for seq, payload in events:
            self._take(WorkerEvents(report.worker, seq, decode_batch(payload)))

    async def decide(self) -> list[Assign | Shed]:
        """What was decided of requests; waits until there is something."""
        await self._news.wait()
        self._news.clear()
        decisions, self._decisions = self._decisions, []
        return decisions

    def _marked(self, report: WorkerReport) -> WorkerReport:
        return msgspec.structs.replace(report, draining=report.worker in self._draining)

    def _arrival(self, wish: Wish, size: int, now: float) -> Arrival:
        tokens = np.frombuffer(wish.prompt, "<i4")
        frames = make_frames(wish.namespace, None)
        return Arrival(
            wish.request_id,
            len(tokens),
            wish.output_tokens,
            self._namer.walk(tokens, frames, wish.public // size, size),
            None if wish.slack is None else now + wish.slack,
            wish.tpot,
            wish.priority,
        )

    def _take(self, event: RouterEvent) -> None:
        """Nothing is known before the front end has come."""
        if self._router is not None:
            for decision in self._router.handle(event, time.monotonic()):
                self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case AskForPicture(worker):
                self._workers[worker].tell_all.remote()
            case Assign() | Shed():
                self._decisions.append(decision)
                self._news.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            self._take(Tick())
