"""What the scheduler has decided, with the numbers it decided by."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagedkv.scheduling.batch import Row
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.step import Step, TableMirror

STEP = "step"
WAIT = "wait"
_KEYS = ("step", "now", "kind", "request")


@dataclass(slots=True, eq=False)
class Decision:
    """One entry of the log. Whoever is given one changes nothing in it.

    step: the step that was being planned or, for what a Result has led to, that was computed.
    now: seconds, as the scheduler was told. request: "" where no single one is concerned.
    numbers: plain values, and arrays in the entry of a step; see docs/howto/explain_a_decision.md.
    """

    step: int
    now: float
    kind: str
    request: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """The entry as a line of JSON, without the line feed. Equal entries have equal lines."""
        values = (self.step, self.now, self.kind, self.request)
        return json.dumps(
            dict(zip(_KEYS, values, strict=True)) | self.numbers,
            default=_plain,
            separators=(",", ":"),
        )

    @classmethod
    def of(cls, values: dict[str, Any]) -> Decision:
        """From a line that was read. ValueError says what is missing or of another type."""
        step, now, kind, request = (values.get(key) for key in _KEYS)
        if not isinstance(step, int) or not isinstance(now, (int, float)):
            raise ValueError("'step' or 'now' is missing or no number")
        if not isinstance(kind, str) or not isinstance(request, str):
            raise ValueError("'kind' or 'request' is missing or no text")
        numbers = {key: value for key, value in values.items() if key not in _KEYS}
        return cls(step, now, kind, request, numbers)


Sink = Callable[[Decision], None]


class DecisionLog:
    """The last `limit` decisions, and the last `limit` steps; none of them for 0.

    A request that is left waiting for the same reason in plan after plan has one entry: its numbers
    are those of the first time, `count` and `last_step`, `last_now` tell of the others. It enters
    the log when the reason changes or something else happens to the request.
    `step` and `now` of new entries are those given to `at`.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_dropped = 0  # decisions that are no longer kept
        self._decisions: deque[Decision] = deque(maxlen=limit)
        self._steps: deque[Decision] = deque(maxlen=limit)
        self._waits: dict[str, Decision] = {}
        self._sinks: list[Sink] = []
        self._mirror = TableMirror()
        self._step, self._now = 0, 0.0

    @property
    def decisions(self) -> list[Decision]:
        """Oldest first; then the waits that go on."""
        return [*self._decisions, *self._waits.values()]

    def newest(self) -> Iterator[Decision]:
        """Decisions one by one, newest first, without the waits that go on."""
        return reversed(self._decisions)

    @property
    def waits(self) -> Iterable[Decision]:
        """Those that go on, by their beginning."""
        return self._waits.values()

    @property
    def steps(self) -> list[Decision]:
        """What was computed with which blocks, oldest first."""
        return list(self._steps)

    def follow(self, sink: Sink) -> None:
        """Calls `sink` with every entry from now on, in order, whatever `limit` is."""
        self._sinks.append(sink)

    def at(self, step: int, now: float) -> None:
        """What is decided from now on is decided for this step, at this time."""
        self._step, self._now = step, now

    def note(self, kind: str, request: str = "", /, **numbers: object) -> None:
        """A decision. It ends the wait of the request."""
        if not self._wanted:
            return
        self._end_wait(request)
        self._keep(Decision(self._step, self._now, kind, request, numbers))

    def wait(self, request: str, reason: str, /, **numbers: object) -> None:
        """A request is left waiting in this plan. reason: a word of `explain`."""
        if self._wanted and not self.still_waits(request, reason):
            self._end_wait(request)
            last = {"count": 1, "last_step": self._step, "last_now": self._now}
            wait = Decision(
                self._step, self._now, WAIT, request, {"reason": reason, **numbers, **last}
            )
            self._waits[request] = wait

    def still_waits(self, request: str, reason: str) -> bool:
        """Whether it was waiting for this already, which is noted: no numbers are needed then."""
        wait = self._waits.get(request)
        if wait is None or wait.numbers["reason"] != reason:
            return False
        wait.numbers["count"] += 1
        wait.numbers["last_step"], wait.numbers["last_now"] = self._step, self._now
        return True

    def planned(self, step: Step, rows: Sequence[Row], running: Sequence[Request]) -> None:
        """A step: its rows, the table entries that it changes, and who got less than it could use.

        `table` has int32 [k, 3]: table row, place in it, block id; `stores` and `loads` the blocks
        of each transfer.
        """
        if not self._wanted:
            return
        for row in rows:
            if row.count > 1 or row.limit:
                self.note(
                    "chunk",
                    row.branch.request.id,
                    tokens=row.count,
                    pending=row.branch.pending,
                    limit=row.limit,
                )
        if len(rows) < sum(len(request.branches) for request in running):
            seen = {row.branch.seq for row in rows}
            for request in running:
                left = [b.pending for b in request.branches if b.seq not in seen and b.pending]
                if left:
                    self.wait(request.id, "budget", pending=sum(left), budget=step.num_tokens)
        entry: dict[str, Any] = {"seqs": step.seqs, "query_lens": step.query_lens}
        entry["table"] = self._mirror.changes(step)
        if len(step.copies):
            entry["copies"] = step.copies
        if step.stores or step.loads:
            entry["stores"] = [transfer.blocks for transfer in step.stores]
            entry["loads"] = [transfer.blocks for transfer in step.loads]
        self._keep(Decision(self._step, self._now, STEP, "", entry))

    def finish(self) -> None:
        """Nothing more comes: the waits that go on enter the log as they are."""
        for request in list(self._waits):
            self._end_wait(request)

    @property
    def _wanted(self) -> bool:
        return self.limit > 0 or bool(self._sinks)

    def _end_wait(self, request: str) -> None:
        wait = self._waits.pop(request, None)
        if wait is not None:
            self._keep(wait)

    def _keep(self, entry: Decision) -> None:
        kept = self._steps if entry.kind == STEP else self._decisions
        if kept is self._decisions and len(kept) == self.limit:
            self.num_dropped += 1
        kept.append(entry)
        for sink in self._sinks:
            sink(entry)


def _plain(value: Any) -> object:
    """What json does not know: arrays and numbers of numpy."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no plain value")
