"""Everything a run depends on, and what was decided, as a file to be replayed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from pagedkv.cache import SanitizerError
from pagedkv.engine.json_lines import LineWriter
from pagedkv.engine.values import to_json
from pagedkv.scheduling.messages import Message
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.scheduling.step import Result

RECORDING = "pagedkv recording 1"
# Of the pool: what BlockManager is made with.
POOL = (
    "num_blocks",
    "block_size",
    "prefix_caching",
    "max_seqs",
    "max_blocks_per_seq",
    "eviction",
)
# What the lines that are no decisions begin with, beside the names of messages.
INPUTS = ("settings", "at", "found", "reset_cache", "release", "result", "failure", "end")
MESSAGES = ("Add", "Abort", "Drain", "Resume")
_LOG = logging.getLogger("pagedkv")


class Recorder:
    """Told by an EngineCore of everything that comes in, in order.

    The file has a line for each: the settings; `at`, the time of an iteration; the messages applied
    in it; `found`, what lower tiers say they have; the decisions; the Result of its step, or its
    failure. Token ids are part of it, K/V are not. Nothing may have run before. What cannot be
    written ends the recording, with a warning, and no more.
    """

    def __init__(self, path: str | Path, scheduler: Scheduler) -> None:
        """ConfigError: the file cannot be written."""
        self._scheduler = scheduler
        self._file = LineWriter(path, RECORDING, "record")
        pool = {name: getattr(scheduler.manager, name) for name in POOL}
        tiering = scheduler.tiering
        self._write(
            "settings",
            {
                "scheduler": scheduler.config,
                "pool": pool,
                "tier_block_bytes": None if tiering is None else tiering.block_bytes,
            },
        )
        if tiering is not None:
            tiering.watchers.append(lambda found: self._write("found", found))
        scheduler.log.follow(lambda entry: self._file.write(entry.line()))

    def begin(self, now: float) -> None:
        """An iteration begins."""
        self._write("at", now)

    def message(self, message: Message) -> None:
        """It is about to be applied."""
        self._write(type(message).__name__, message)

    def reset_cache(self) -> None:
        """Between two iterations the cached prefixes are about to be forgotten."""
        self._write("reset_cache", None)

    def release(self, request_id: str, now: float) -> None:
        """Between two iterations a request is about to be given up."""
        self._write("release", {"id": request_id, "now": now})

    def result(self, result: Result) -> None:
        self._write("result", result)

    def failure(self, error: BaseException) -> None:
        """The step went wrong as a whole."""
        if isinstance(error, SanitizerError):
            kind = "sanitizer"
        else:
            kind = "error" if isinstance(error, Exception) else "interrupt"
        text = repr(error) if kind == "interrupt" else str(error)
        self._write("failure", {"kind": kind, "type": type(error).__name__, "text": text})

    def close(self) -> None:
        """The run is over: so is the scheduler's log."""
        self._write("end", None)
        self._scheduler.finish()
        self._file.close()

    def _write(self, name: str, value: Any) -> None:
        try:
            line = json.dumps({name: to_json(value)}, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            _LOG.warning("%s: %s cannot be recorded and is the end of it: %s", self, name, error)
            self._file.close()
        else:
            self._file.write(line)

    def __str__(self) -> str:
        return str(self._file.path)
