"""The actor of a worker: an engine core in a thread of its own, and its way to everybody else.

What concerns requests travels as the frames of `engine.wire`, to and from the front end. All
methods are quick and run in one event loop. Ray does not keep calls of one caller in order: one
with much to bring is overtaken by the next.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pagedkv import __version__
from pagedkv.cluster.in_order import InOrder, when_late

if TYPE_CHECKING:
    from pagedkv.cluster.objects import ObjectTransport, Parcel
    from pagedkv.cluster.reporter import Reporter
    from pagedkv.engine.core_loop import CoreLoop

# Requests on their way to a worker at once.
_MOST_MOVES = 32
# Asks a core something only to have the reporter look at it; the front end counts from 0.
_NOBODY = -1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Started(NamedTuple):
    """What a worker is. boot: another text each time its process starts.

    host: one text for each kernel that runs: monotonic clocks of one host are the same. now: of the
    worker's clock, in seconds.
    """

    boot: str
    host: str
    pid: int
    version: str
    now: float


def host_id() -> str:
    """Of the running kernel."""
    return _BOOT_ID.read_text().strip()


class Worker:
    """Hosts a core.

    threads: to compute with; 0: as many as the process would use by itself. shared: all workers are
    on this host, and K/V go between them through shared memory; else through Ray's object store.
    """

    def __init__(self, name: str, threads: int, shared: bool) -> None:
        # Before torch is loaded.
        if threads:
            os.environ["OMP_NUM_THREADS"] = os.environ["PAGEDKV_NUM_THREADS"] = str(threads)
        logging.basicConfig(level=logging.WARNING, format=f"%(levelname)s:     {name}: %(message)s")
        self._name, self._shared = name, shared
        self._boot = secrets.token_hex(8)
        self._core: CoreLoop | None = None
        self._reporter: Reporter | None = None
        self._thread: threading.Thread | None = None
        self._peers: Mapping[str, Any] = {}
        self._objects: ObjectTransport | None = None
        self._inbox: InOrder[list[bytes]] = InOrder()
        self._hearing: dict[str, asyncio.Lock] = {}
        self._outbox: list[bytes] = []
        self._news = asyncio.Event()

    async def start(
        self,
        number: int,
        arguments: Mapping[str, Any],
        slow_step: float,
        peers: Mapping[str, Any],
        router: Any,
    ) -> Started:
        """Begins to load the model; Ready or Died is the first frame. Nothing the second time.

        number: larger than that of any start before, for the workers that it moves requests with.
        arguments: of `engine.arguments.make_llm`. peers: the other workers' actors, by name.
        """
        if self._thread is None:
            self._peers = peers
            loop = asyncio.get_running_loop()
            self._thread = threading.Thread(
                target=self._run,
                args=(number, dict(arguments), slow_step, loop, router),
                name="pagedkv-core",
                daemon=True,
            )
            self._thread.start()
        return Started(self._boot, host_id(), os.getpid(), __version__, time.monotonic())

    async def send(self, boot: str, number: int, frames: list[bytes]) -> None:
        """Frames for the core. Those for an earlier process of this actor are dropped.

        number: counts these calls for one `boot`, from 0.
        """
        from pagedkv.engine.wire import unpack_to_core

        if boot != self._boot:
            return
        for ready in self._inbox.take(number, frames):
            for frame in ready:
                if self._core is not None:
                    self._core.send(unpack_to_core(frame))
        when_late(self._inbox, self._give_up)

    async def receive(self, boot: str) -> tuple[float, list[bytes]]:
        """What its clock shows, and frames of the core; waits until there are some."""
        from pagedkv.engine.wire import Died, pack

        if boot != self._boot:
            return time.monotonic(), [pack(Died("Restart", "its process was started again"))]
        await self._news.wait()
        self._news.clear()
        frames, self._outbox = self._outbox, []
        return time.monotonic(), frames

    async def hear(self, worker: str, frame: bytes, parcel: Parcel | None) -> None:
        """From another worker: a frame, and the object that it refers to."""
        from pagedkv.cluster.objects import fetched
        from pagedkv.engine.wire import FromPeer

        async with self._hearing.setdefault(worker, asyncio.Lock()):  # in the order of these calls
            payload = None if parcel is None else await fetched(parcel)
            if self._core is None:
                return
            if self._objects is not None and parcel is not None:
                self._objects.expect(parcel.name, payload)
            self._core.send(FromPeer(worker, frame))

    async def tell_all(self) -> None:
        """The router has missed something of the cache."""
        from pagedkv.engine.wire import Ask

        if self._reporter is not None and self._core is not None:
            self._reporter.ask_for_picture()
            self._core.send(Ask(_NOBODY, "look"))  # it may be idle

    def _run(
        self,
        number: int,
        arguments: Mapping[str, Any],
        slow_step: float,
        loop: asyncio.AbstractEventLoop,
        router: Any,
    ) -> None:
        """The core's thread."""
        from pagedkv.cluster.objects import ObjectTransport
        from pagedkv.cluster.reporter import Reporter
        from pagedkv.engine.arguments import make_llm
        from pagedkv.engine.core_loop import CoreLoop, core_facts
        from pagedkv.engine.open_moves import open_moves
        from pagedkv.engine.settle import settle
        from pagedkv.engine.watchdog import watching
        from pagedkv.engine.wire import Answer, Died, FromCore, Ready, ToPeer, pack

        def post(frame: FromCore) -> None:
            loop.call_soon_threadsafe(self._put, pack(frame))

        try:
            llm = make_llm({**arguments, "max_moves": _MOST_MOVES})
            core = llm.engine.core
            objects = None if self._shared else ObjectTransport()
            moves = open_moves(core, self._name, number, objects)
            reporter = Reporter(self._name, self._boot, host_id(), core, moves, router, loop)
            facts = replace(
                core_facts(core, str(llm.folder), llm.report.lines()),
                kv_bytes_per_token=llm.report.bytes_per_token,
                model=moves.endpoint.ours.model.hex(),
            )
        except BaseException as error:  # whoever waits for Ready is told
            post(Died(type(error).__name__, str(error)))
            return

        def take(frame: FromCore) -> None:
            if isinstance(frame, ToPeer):
                parcel = None if objects is None else objects.named_in(frame.frame)
                loop.call_soon_threadsafe(self._tell, frame.worker, frame.frame, parcel)
                return
            if not isinstance(frame, Died):
                reporter.look()
            if not (isinstance(frame, Answer) and frame.id == _NOBODY):
                post(frame)

        core_loop = CoreLoop(core, take, moves=moves)
        self._core, self._reporter, self._objects = core_loop, reporter, objects
        settle()
        post(Ready(facts))
        with closing(llm), closing(moves), watching(core_loop, slow_step):
            if core_loop.run():
                post(Died("Close", "the core was closed"))

    def _tell(self, worker: str, frame: bytes, parcel: Parcel | None) -> None:
        self._peers[worker].hear.remote(self._name, frame, parcel)

    def _give_up(self, missing: str) -> None:
        """Without what did not come nobody knows what the front end takes for granted."""
        from pagedkv.engine.wire import Died, pack

        self._put(pack(Died("LostFrames", missing)))

    def _put(self, frame: bytes) -> None:
        self._outbox.append(frame)
        self._news.set()
