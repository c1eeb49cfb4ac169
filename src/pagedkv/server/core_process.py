"""The process of a core: `python -m pagedkv.server.core_process FD`, started by `ProcessLink`.

It ends when it is told to, and when the other end of its socket is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from pagedkv import extras
from pagedkv.engine.arguments import make_llm
from pagedkv.engine.core_loop import CoreLoop, core_facts
from pagedkv.engine.settle import settle
from pagedkv.engine.watchdog import watching
from pagedkv.engine.wire import (
    Batch,
    Close,
    Configure,
    Died,
    FromCore,
    Ready,
    ToCore,
    pack,
    unpack_to_core,
)
from pagedkv.errors import PagedKVError
from pagedkv.server.core_link import LENGTH

if TYPE_CHECKING:
    from pagedkv.engine.llm import LLM
    from pagedkv.server.kv_events import EventPublisher

# Seconds that a step may go on after the front is gone.
_GRACE = 5.0


class _Frames:
    """Whole frames over a socket that blocks."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._file = connection.makefile("rb")

    def read(self) -> ToCore | None:
        """None: the other end is gone."""
        try:
            head = self._file.read(LENGTH.size)
            if len(head) < LENGTH.size:
                return None
            (length,) = LENGTH.unpack(head)
            data = self._file.read(length)
        except ConnectionError:  # it went without reading what was there for it
            return None
        return None if len(data) < length else unpack_to_core(data)

    def write(self, frame: FromCore) -> None:
        data = pack(frame)
        self._socket.sendall(LENGTH.pack(len(data)) + data)


class _Listener:
    """Takes the messages from the front, in a thread of its own.

    While there is no loop the process ends with the first of them, or with its front: nobody
    waits for the model any more.
    """

    def __init__(self, frames: _Frames) -> None:
        self._frames = frames
        self._loop: CoreLoop | None = None
        threading.Thread(target=self._listen, name="pagedkv-listener", daemon=True).start()

    def pass_on_to(self, loop: CoreLoop) -> None:
        """Before the front is told that the core is ready."""
        self._loop = loop

    def _listen(self) -> None:
        while (message := self._frames.read()) is not None:
            self._taker().send(message)
        self._taker().send(Close())
        # A step that hangs must not keep a process alive that nobody can reach any more.
        threading.Timer(_GRACE, os._exit, [1]).start()

    def _taker(self) -> CoreLoop:
        if self._loop is None:
            os._exit(1)
        return self._loop


def _publisher(configure: Configure) -> EventPublisher | None:
    """Before the model is loaded: a port that is taken shows at once."""
    if configure.kv_events is None:
        return None
    with extras():
        from pagedkv.server.kv_events import EventPublisher
    return EventPublisher(*configure.kv_events)


def _publishing(
    publisher: EventPublisher, llm: LLM, post: Callable[[FromCore], None]
) -> Callable[[FromCore], None]:
    """Publishes what the cache has done after every iteration of the loop."""
    manager = llm.engine.core.scheduler.manager
    # Servers with the same model and block size give the same hashes.
    publisher.follow(manager, f"{llm.folder} {manager.block_size}".encode())

    def post_and_publish(frame: FromCore) -> None:
        post(frame)
        if isinstance(frame, Batch):
            publisher.publish()

    return post_and_publish


def _serve(frames: _Frames) -> int:
    configure = frames.read()
    if not isinstance(configure, Configure):
        return 1
    listener = _Listener(frames)
    try:
        publisher = _publisher(configure)
        llm = make_llm(configure.arguments)
    except (PagedKVError, MemoryError) as error:
        frames.write(Died(type(error).__name__, str(error)))
        return 1
    core = llm.engine.core
    post = frames.write if publisher is None else _publishing(publisher, llm, frames.write)
    loop = CoreLoop(core, post)
    listener.pass_on_to(loop)
    settle()
    frames.write(Ready(core_facts(core, str(llm.folder), llm.report.lines())))
    with closing(llm), watching(loop, configure.slow_step):
        return 0 if loop.run() else 1


def main() -> int:
    # Ctrl-C in a terminal reaches the whole group: the front decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s:     engine: %(message)s")
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        try:
            return _serve(_Frames(connection))
        except BrokenPipeError:  # nobody is left to be told
            return 1


if __name__ == "__main__":
    code = main()
    os._exit(code)  # the listening thread may be in a read that never ends
