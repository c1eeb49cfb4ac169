"""Steps that take too long are reported while they run, once each, with what the core is doing."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from pagedkv.engine.core_loop import CoreLoop

_LOG = logging.getLogger("pagedkv.engine")
# Looks at a step before it counts as slow: how late a report may be, as a part of the limit.
_LOOKS = 4


class Watchdog:
    """Looks at a loop from another thread, and changes nothing. limit: seconds of a step."""

    def __init__(self, loop: CoreLoop, limit: float) -> None:
        self._loop, self._limit = loop, limit
        self._reported: float | None = None  # when the step began that was reported

    def look(self) -> str | None:
        """What to report. None: no step takes too long, or it has been reported."""
        began = self._loop.step_began
        if began is None or began == self._reported:
            return None
        seconds = self._loop.clock() - began
        if seconds < self._limit:
            return None
        self._reported = began
        return f"a step has been running for {seconds:.1f} seconds\n{describe(self._loop)}"


@contextmanager
def watching(loop: CoreLoop, limit: float) -> Iterator[None]:
    """Slow steps are logged meanwhile."""
    watchdog, over = Watchdog(loop, limit), threading.Event()

    def watch() -> None:
        while not over.wait(limit / _LOOKS):
            report = watchdog.look()
            if report is not None:
                _LOG.error("%s", report)

    thread = threading.Thread(target=watch, name="pagedkv-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def describe(loop: CoreLoop) -> str:
    """The step in flight, the requests, the pool, and where the loop's thread is.

    From any thread, while the loop runs: single numbers may be of different moments.
    """
    scheduler = loop.core.scheduler
    manager, counts, step = scheduler.manager, scheduler.stats, scheduler.step_in_flight
    if step is None:
        lines = ["step: none in flight, it is being planned or committed"]
    else:
        rows = len(step.seqs)
        lines = [f"step {step.index}: {rows} rows, {step.num_tokens} tokens"]
    lines.append(f"requests: {counts.num_running} running, {counts.num_waiting} waiting")
    lines.append(
        f"pool: {manager.num_blocks} blocks, {manager.num_held_blocks} held, "
        f"{manager.num_cached_blocks} cached, {manager.num_draining_blocks} draining, "
        f"{manager.num_free_blocks} free"
    )
    frame = None if loop.thread is None else sys._current_frames().get(loop.thread)
    if frame is not None:
        lines.append("".join(traceback.format_stack(frame)).rstrip())
    return "\n".join(lines)
