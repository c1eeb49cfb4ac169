"""Who called: the frames outside the cache from which a verb was called, and when it was."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import numpy as np

from pagedkv.cache.types import Int32, Int64

_CACHE = str(Path(__file__).parents[1])  # pagedkv/cache: its own frames say nothing
_DEPTH = 5  # frames kept of a call

Frames = tuple[tuple[str, int, str], ...]  # (file, line, function), innermost first


class Sites:
    """Interned call sites. Site 0 stands for what happened before anybody watched."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Frames], int] = {("", ()): 0}
        self._listed: list[tuple[str, Frames]] = [("", ())]

    def here(self, verb: str) -> int:
        """The site of the call of `verb` that is under way."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_CACHE):
            frame = frame.f_back
        frames: list[tuple[str, int, str]] = []
        while frame is not None and len(frames) < _DEPTH:
            frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        key = verb, tuple(frames)
        site = self._known.setdefault(key, len(self._listed))
        if site == len(self._listed):
            self._listed.append(key)
        return site

    def lines(self, site: int) -> list[str]:
        """The verb, then one line a frame."""
        verb, frames = self._listed[site]
        if not site:
            return ["a call that nobody watched"]
        return [f"{verb}, called from", *(f"  {f}:{line} in {name}" for f, line, name in frames)]


class Trail:
    """For each thing of a kind (block, row) the last event that happened to it.

    Arrays by id: `sites`, `steps` (the step of the engine, -1: none) and `seqs` (0: none).
    """

    def __init__(self, size: int) -> None:
        self.sites = np.zeros(size, np.int32)
        self.steps = np.full(size, -1, np.int64)
        self.seqs = np.zeros(size, np.int64)

    def mark(self, ids: Int32 | Int64, site: int, step: int, seqs: Int64 | int) -> None:
        self.sites[ids] = site
        self.steps[ids] = step
        self.seqs[ids] = seqs

    def lines(self, sites: Sites, at: int, what: str) -> list[str]:
        """What happened to `at`, for a report: `what` is "allocated", "closed" ..."""
        if not self.sites[at]:
            return []
        when = "" if self.steps[at] < 0 else f" in step {self.steps[at]}"
        whose = f", sequence {self.seqs[at]}" if self.seqs[at] else ""
        first, *rest = sites.lines(int(self.sites[at]))
        return [f"{what}{when}{whose}, by {first}", *(f"  {line}" for line in rest)]
