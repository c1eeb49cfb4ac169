"""Lower numbers first."""

from __future__ import annotations

from pagedkv.scheduling.line import Key
from pagedkv.scheduling.policies.fcfs import Fcfs
from pagedkv.scheduling.request import Request


class Priority(Fcfs):
    """A request of priority p is served as if it had come p * ageing seconds later.

    So waiting ages it: one that waits gives way only to requests that arrive less than
    (p - q) * ageing seconds after it, where q is the lowest number in use, and to those preempted.
    Who waits is bounded by what arrives in that time, whatever comes later.
    """

    def __init__(self, ageing: float) -> None:
        self._ageing = ageing

    def key(self, request: Request) -> Key:
        return request.arrival + request.priority * self._ageing, request.arrival, request.order

    def yield_class(self, request: Request, now: float) -> tuple[float, ...]:
        """The highest number; between equals of it ageing does not count."""
        return (float(request.priority),)
