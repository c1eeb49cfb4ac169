"""Requests that wait, in a policy's order."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from pagedkv.scheduling.policies.fcfs import WaitingKey
from pagedkv.scheduling.request import Request


class WaitingQueue:
    """A priority queue. Removal is lazy: a request that has left is dropped when it comes up.

    Once more than half have left, all of those are dropped (amortised O(log n) a removal): a first
    request that waits long does not keep the ones that left behind it.
    Keys are unique and stay as they are while the request waits. A request that left from the
    middle (an abort) does not come back.
    """

    def __init__(self, key: Callable[[Request], WaitingKey]) -> None:
        self._key = key
        self._heap: list[tuple[WaitingKey, Request]] = []
        self._waiting: set[int] = set()  # by Request.order; never iterated

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        self._waiting.add(request.order)
        heapq.heappush(self._heap, (self._key(request), request))

    def peek(self) -> Request:
        """The first request. IndexError when nobody waits."""
        return self._heap[0][1]

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands; nothing happens when it does not wait."""
        self._waiting.discard(request.order)
        while self._heap and self._heap[0][1].order not in self._waiting:
            heapq.heappop(self._heap)
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [entry for entry in self._heap if entry[1].order in self._waiting]
            heapq.heapify(self._heap)
