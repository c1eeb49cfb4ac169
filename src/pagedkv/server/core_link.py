"""The way from a front to its core, in a process of its own or in a thread of this one."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pagedkv.engine.core import EngineCore
from pagedkv.engine.core_loop import CoreLoop, core_facts
from pagedkv.engine.facts import Facts
from pagedkv.engine.wire import (
    Close,
    Configure,
    Died,
    FromCore,
    Ready,
    ToCore,
    pack,
    unpack_from_core,
)

# Before every frame on a socket: its length in bytes.
LENGTH = struct.Struct("<I")
# Seconds that a core has to end when it is told to: for the step in flight, and for its files.
_ENDING = 10.0


class CoreLink(Protocol):
    """All of it is called from the thread of one event loop."""

    async def start(self) -> None:
        """Makes the core; the first frame to be received is Ready, or Died: there is none.

        PagedKVError: not even that could begin.
        """
        ...

    def send(self, message: ToCore) -> None:
        """In order, without waiting. Nothing happens if the core has died."""
        ...

    async def receive(self) -> FromCore:
        """The next frame. Died is the last one."""
        ...

    async def close(self) -> None:
        """Lets the core complete its files and end; one that does not is killed where it can be."""
        ...

    def kill(self) -> None:
        """Ends the core at once, where it is a process. Nothing is completed."""
        ...


class ThreadLink:
    """A core in a thread of this process: for tests, and where two processes are too many.

    make: builds the core, in that thread. facts: of that core. finish: is called there after the
    last step.
    """

    def __init__(
        self,
        make: Callable[[], EngineCore],
        facts: Callable[[EngineCore], Facts] = core_facts,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._make, self._facts, self._finish = make, facts, finish
        self._frames: asyncio.Queue[FromCore] = asyncio.Queue()
        self._core_loop: CoreLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def core_loop(self) -> CoreLoop:
        """To look at. RuntimeError before Ready was received."""
        if self._core_loop is None:
            raise RuntimeError("the core is not ready")
        return self._core_loop

    async def start(self) -> None:
        loop = asyncio.get_running_loop()

        def post(frame: FromCore) -> None:
            loop.call_soon_threadsafe(self._frames.put_nowait, frame)

        self._thread = threading.Thread(target=self._run, args=(post,), name="pagedkv-core")
        self._thread.start()

    def send(self, message: ToCore) -> None:
        if self._core_loop is not None:
            self._core_loop.send(message)

    async def receive(self) -> FromCore:
        return await self._frames.get()

    async def close(self) -> None:
        self.send(Close())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def kill(self) -> None:
        pass  # a thread cannot be ended

    def _run(self, post: Callable[[FromCore], None]) -> None:
        try:
            core = self._make()
            self._core_loop = CoreLoop(core, post)
        except BaseException as error:  # whoever waits for Ready is told
            post(Died(type(error).__name__, str(error)))
            return
        post(Ready(self._facts(core)))
        if self._core_loop.run():
            self._finish()
            post(Died("Close", "the core was closed"))


class ProcessLink:
    """A core in a process of its own, at the other end of a socket.

    arguments: of `LLM`, as plain values; see `core_process`. slow_step, kv_events: as in
    `Configure`. program: runs that process when the number of its socket is added.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        slow_step: float = 60.0,
        program: Sequence[str] = (sys.executable, "-m", "pagedkv.server.core_process"),
        kv_events: tuple[str, str] | None = None,
    ) -> None:
        self._configure = Configure(dict(arguments), slow_step, kv_events)
        self._program = tuple(program)
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int:
        """Of the core's process. RuntimeError before it was started."""
        if self._process is None:
            raise RuntimeError("the core was not started")
        return self._process.pid

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*self._program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self.send(self._configure)

    def send(self, message: ToCore) -> None:
        if self._writer is not None and not self._writer.is_closing():
            data = pack(message)
            self._writer.write(LENGTH.pack(len(data)) + data)

    async def receive(self) -> FromCore:
        if self._reader is None:
            raise RuntimeError("the core was not started")
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            return unpack_from_core(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return Died("EOF", f"the core's process has ended: {await self._ending()}")

    async def close(self) -> None:
        self.send(Close())
        await self._ending()
        if self._writer is not None:
            self._writer.close()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def _ending(self) -> str:
        if self._process is None:
            return "it was not started"
        try:
            code = await asyncio.to_thread(self._process.wait, _ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = await asyncio.to_thread(self._process.wait)
        return f"signal {-code}" if code < 0 else f"exit status {code}"
