"""Ctrl-C between steps, not inside them: bookkeeping that is cut in the middle cannot be undone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Holds SIGINT back while the block runs and delivers it to its handler at the end.

    A second SIGINT is not held back: a step that hangs can be left, at the price of the engine.
    Does nothing outside the main thread, where Python runs no handlers, and where SIGINT has no
    handler written in Python.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if pending:
            handler(number, frame)
        pending.append((number, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pending:
            handler(*pending[0])
