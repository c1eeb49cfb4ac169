"""The workers as arrays: what each has reported, and what has been sent to it since.

A report is always a little old. What a worker has been given and has not reported yet is added to
its numbers, or every request of a moment would go to the same worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.errors import ConfigError
from pagedkv.transfer.routing import Role, WorkerReport

_COLUMNS = np.dtype(
    [
        ("prefills", np.bool_),
        ("decodes", np.bool_),
        ("host", np.int64),
        ("seed", np.uint64),  # for rendezvous hashing
        ("num_blocks", np.int64),
        ("room", np.int64),  # blocks that can be given away
        ("wait_s", np.float64),
        ("queued_tokens", np.float64),
        ("rate", np.float64),  # prefilled tokens a second
        ("step_s", np.float64),
        ("step_s_each", np.float64),
    ],
    align=True,  # numpy copies what is not
)
_PLACES = 16  # at the start; then twice as many whenever they are all used


@dataclass(frozen=True, slots=True)
class Sent:
    """What a request takes of a worker that has not reported it yet."""

    place: int
    blocks: int
    tokens: int  # to be prefilled
    sequences: int  # to be decoded


class Fleet:
    """Workers by their place, which stays while they live and is then used again.

    rows: structured array [places] of what is known of each, for reading only. A place that no
    worker has neither prefills nor decodes.
    """

    def __init__(self) -> None:
        self.rows: npt.NDArray[np.void] = _empty(_PLACES)
        self.places: dict[str, int] = {}
        self.reports: dict[int, WorkerReport] = {}
        self._unused = list(range(_PLACES))[::-1]
        self._hosts: dict[str, int] = {}
        self._turning: dict[int, Role] = {}  # roles that workers are to report next
        self._sent: dict[str, tuple[Sent, ...]] = {}  # by request
        self._sent_to: dict[int, set[str]] = {}  # by place: requests of which a part goes there

    @property
    def num_hosts(self) -> int:
        return len(self._hosts)

    def name(self, place: int) -> str:
        return self.reports[place].worker

    def report(self, report: WorkerReport) -> int:
        """Takes a report and returns the worker's place. ConfigError for a rate that is none."""
        if not report.prefill_tokens_per_s > 0:
            raise ConfigError(
                f"worker {report.worker}: prefill_tokens_per_s={report.prefill_tokens_per_s} "
                "must be above 0: report an estimate until steps have been measured"
            )
        place = self.places.get(report.worker)
        if place is None:
            place = self._take_place(report.worker)
        self.reports[place] = report
        if self._turning.get(place) == report.role:
            del self._turning[place]
        for request in report.seen:
            if request in self._sent_to[place]:
                self._sent_to[place].remove(request)
                self._drop(request, place)
        self._refresh(place)
        return place

    def leave(self, worker: str) -> int:
        """Forgets a worker; returns the place that it had. KeyError if it is not known."""
        place = self.places.pop(worker)
        self.rows[place] = _empty(1)[0]
        del self.reports[place]
        self._turning.pop(place, None)
        for request in self._sent_to.pop(place):
            self._drop(request, place)
        self._unused.append(place)
        return place

    def turn(self, place: int, role: Role) -> None:
        """Gives the worker nothing until it reports this role."""
        self._turning[place] = role
        self._refresh(place)

    def stop_turning(self) -> None:
        """Takes workers as they report, whatever they were to report."""
        places, self._turning = list(self._turning), {}
        for place in places:
            self._refresh(place)

    def send(self, request: str, parts: tuple[Sent, ...]) -> None:
        """Counts a request as on its way until its workers have reported it."""
        self.ended(request)
        self._sent[request] = parts
        for part in parts:
            self._sent_to[part.place].add(request)
            self._add(part)

    def ended(self, request: str) -> None:
        """The request is over, reported or not."""
        parts = self._sent.pop(request, ())
        for part in parts:
            self._sent_to[part.place].discard(request)
        for part in parts:
            self._refresh(part.place)

    def _drop(self, request: str, place: int) -> None:
        left = tuple(part for part in self._sent[request] if part.place != place)
        if left:
            self._sent[request] = left
        else:
            del self._sent[request]

    def _refresh(self, place: int) -> None:
        report, row = self.reports[place], self.rows[place]
        active = not report.draining and place not in self._turning
        row["prefills"] = active and report.role != "decode"
        row["decodes"] = active and report.role != "prefill"
        row["host"] = self._hosts.setdefault(report.host, len(self._hosts))
        row["num_blocks"] = report.num_blocks
        row["room"] = report.free_blocks - report.promised_blocks
        row["wait_s"] = report.wait_s
        row["queued_tokens"] = report.queued_tokens
        row["rate"] = report.prefill_tokens_per_s
        row["step_s"] = report.step_s
        row["step_s_each"] = report.step_s_per_sequence
        for request in self._sent_to[place]:
            for part in self._sent[request]:
                if part.place == place:
                    self._add(part)

    def _add(self, part: Sent) -> None:
        row = self.rows[part.place]
        row["room"] -= part.blocks
        row["queued_tokens"] += part.tokens
        row["step_s"] += part.sequences * row["step_s_each"]

    def _take_place(self, worker: str) -> int:
        if not self._unused:
            old = len(self.rows)
            self.rows = np.concatenate([self.rows, _empty(old)])
            self._unused = list(range(old, 2 * old))[::-1]
        place = self._unused.pop()
        self.places[worker] = place
        self._sent_to[place] = set()
        seed = int.from_bytes(blake2b(worker.encode(), digest_size=8).digest())
        self.rows[place]["seed"] = seed
        return place


def _empty(places: int) -> Any:
    rows = np.zeros(places, _COLUMNS)
    rows["rate"] = 1
    return rows
