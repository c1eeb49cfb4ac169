"""Requests whose deadline passes: whatever they would still bring is worth nothing."""

from __future__ import annotations

import heapq

from pagedkv.scheduling.messages import Delta
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.roster import Roster


def late(seconds: float, when: str) -> str:
    """What is said to a client whose request was to be over in so many seconds."""
    return f"the deadline, {seconds:.6g} s after the request came, has passed {when}"


class Expiry:
    """A heap of deadlines. O(log n) a request, and nothing for a step in which none passes.

    Requests that leave in time stay in it until their deadline, or until they are the larger half.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []  # deadline, order

    def watch(self, request: Request) -> None:
        """Takes note of a new request's deadline, if it has one."""
        if request.deadline is not None:
            heapq.heappush(self._heap, (request.deadline, request.order, request))

    def end_expired(self, roster: Roster, now: float) -> list[Delta]:
        """Ends every request whose deadline is before `now`, waiting or running."""
        deltas: list[Delta] = []
        if len(self._heap) > 2 * len(roster.requests) + 64:
            self._heap = [entry for entry in self._heap if roster.has(entry[2])]
            heapq.heapify(self._heap)
        while self._heap and self._heap[0][0] < now:
            deadline, _, request = heapq.heappop(self._heap)
            if roster.has(request):
                state = "running" if request.branches else "waiting"
                error = late(deadline - request.arrival, f"while it was {state}")
                deltas += roster.end(request, request.live, "deadline", error, "deadline")
        return deltas
