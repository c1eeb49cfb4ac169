"""What a worker tells the router: how busy it is, and which blocks its cache has."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pagedkv.cluster.promises import promised_blocks
from pagedkv.engine.core import EngineCore
from pagedkv.engine.moves import Moves
from pagedkv.scheduling.backlog import backlog_seconds, load_of
from pagedkv.tiers.names import Namer
from pagedkv.transfer.events import EventStream
from pagedkv.transfer.messages import split_owned_id
from pagedkv.transfer.routing import WorkerReport

# Seconds between two reports. The router counts what it has sent since the last one itself.
EVERY = 0.1
# A router of requests that share prefixes compares names of one kind; what is cached is verified by
# tokens where it is used.
NAMES = b"names of a cluster's router"
# Tokens a second until steps have been measured: only how workers compare matters.
_FIRST_RATE = 1000.0
_CHUNK = 256  # tokens of the prefill by which the rate is told


class Reporter:
    """Looks at a core in its thread, between two steps, and tells the router's actor.

    loop: the actor's, where calls are made. The last report is repeated while nothing happens, so
    that a router which was started again knows everybody soon.
    """

    def __init__(
        self,
        worker: str,
        boot: str,
        host: str,
        core: EngineCore,
        moves: Moves,
        router: Any,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._worker, self._boot, self._host = worker, boot, host
        self._core, self._moves, self._router, self._loop = core, moves, router, loop
        manager = core.scheduler.manager
        self._stream = EventStream(manager.listen(), Namer(NAMES), manager.block_size)
        self._known: set[str] = set()  # requests that were reported as seen
        self._newest: WorkerReport | None = None
        self._next = 0.0
        asyncio.run_coroutine_threadsafe(self._repeat(), loop)

    def look(self) -> None:
        """A report, if the last one was long enough ago or there is news of requests."""
        now = time.monotonic()
        present = set(self._core.scheduler.roster.requests)
        present.update(move.owned_id for move in self._moves.coming)
        seen = present - self._known
        if now < self._next and not seen and self._core.has_unfinished():
            return
        self._next, self._known = now + EVERY, present
        self._newest = self._report(tuple(split_owned_id(name).request for name in sorted(seen)))
        events = self._stream.poll(time.time())
        told = [] if events is None else [(int.from_bytes(events.seq), events.payload)]
        self._loop.call_soon_threadsafe(self._tell, self._newest, told)

    def ask_for_picture(self) -> None:
        """The router has missed something of the cache. From any thread."""
        self._stream.ask_for_picture()

    def _tell(self, report: WorkerReport, events: list[tuple[int, bytes]]) -> None:
        self._router.observe.remote(self._boot, report, events)

    def _report(self, seen: tuple[str, ...]) -> WorkerReport:
        scheduler = self._core.scheduler
        manager, cost, config = scheduler.manager, scheduler.cost, scheduler.config
        load = load_of(scheduler.roster, config)
        rate = _FIRST_RATE
        if cost.num_observed:
            rate = _CHUNK / max(cost.prefill_seconds(_CHUNK, alone=True), 1e-6)
        step = cost.predict(load.decodes, load.context) if load.decodes else cost.predict(1)
        return WorkerReport(
            self._worker,
            "both",  # what it is used for is the front end's to say: see `RouterActor.assign`
            manager.num_blocks,
            manager.num_free_blocks + manager.num_cached_blocks,
            rate,
            promised_blocks=promised_blocks(self._core, self._moves),
            wait_s=backlog_seconds(
                load._replace(prefills=0, prefill_tokens=0), cost, config.max_num_batched_tokens
            ),
            queued_tokens=load.prefill_tokens,
            running=load.decodes,
            step_s=step,
            step_s_per_sequence=max(0.0, cost.predict(load.decodes + 1, load.context) - step),
            host=self._host,
            seen=seen,
        )

    async def _repeat(self) -> None:
        while True:
            if self._newest is not None:
                self._tell(self._newest, [])
            await asyncio.sleep(10 * EVERY)
