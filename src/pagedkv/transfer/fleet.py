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

_COLUMNS: dict[str, type] = {
    "prefills": np.bool_,
    "decodes": np.bool_,
    "host": np.int64,
    "seed": np.uint64,  # for rendezvous hashing
    "num_blocks": np.int64,
    "room": np.int64,  # blocks that can be given away
    "rate": np.float64,  # prefilled tokens a second
    "queued_tokens": np.float64,
    "queue_s": np.float64,  # until a request that comes now is prefilled
    "step_s": np.float64,  # of decodes with one sequence more
}
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

    columns: arrays [num_places] of what is known of each, for reading only. A place that no worker
    has neither prefills nor decodes.
    """

    def __init__(self) -> None:
        self.columns = _empty(_PLACES)
        self.places: dict[str, int] = {}
        self.reports: dict[int, WorkerReport] = {}
        self._unused = list(range(_PLACES))[::-1]
        self._hosts: dict[str, int] = {}
        self._turning: dict[int, Role] = {}  # roles that workers are to report next
        self._sent: dict[str, tuple[Sent, ...]] = {}  # by request
        self._sent_to: dict[int, set[str]] = {}  # by place: requests of which a part goes there

    @property
    def num_places(self) -> int:
        return len(self.columns["room"])

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
        for name, nothing in _empty(1).items():
            self.columns[name][place] = nothing[0]
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
        for part in parts:
            self._refresh(part.place)

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
        report = self.reports[place]
        room, queued = report.free_blocks - report.promised_blocks, report.queued_tokens
        step = report.step_s
        for request in self._sent_to[place]:
            for part in self._sent[request]:
                if part.place == place:
                    room -= part.blocks
                    queued += part.tokens
                    step += part.sequences * report.step_s_per_sequence
        active = not report.draining and place not in self._turning
        columns = self.columns
        columns["prefills"][place] = active and report.role != "decode"
        columns["decodes"][place] = active and report.role != "prefill"
        columns["host"][place] = self._hosts.setdefault(report.host, len(self._hosts))
        columns["num_blocks"][place] = report.num_blocks
        columns["room"][place] = room
        columns["rate"][place] = report.prefill_tokens_per_s
        columns["queued_tokens"][place] = queued
        columns["queue_s"][place] = report.wait_s + queued / report.prefill_tokens_per_s
        columns["step_s"][place] = step + report.step_s_per_sequence

    def _take_place(self, worker: str) -> int:
        if not self._unused:
            old = self.num_places
            self.columns = {
                name: np.concatenate([column, _empty(old)[name]])
                for name, column in self.columns.items()
            }
            self._unused = list(range(old, 2 * old))[::-1]
        place = self._unused.pop()
        self.places[worker] = place
        self._sent_to[place] = set()
        seed = int.from_bytes(blake2b(worker.encode(), digest_size=8).digest())
        self.columns["seed"][place] = seed
        return place


def _empty(places: int) -> dict[str, npt.NDArray[Any]]:
    columns: dict[str, npt.NDArray[Any]] = {
        name: np.zeros(places, kind) for name, kind in _COLUMNS.items()
    }
    columns["rate"][:] = 1
    return columns
