"""Requests that wait, in a policy's order."""

from __future__ import annotations

import heapq

from pagedkv.scheduling.policies.interface import Key, Policy
from pagedkv.scheduling.request import Request


class Line:
    """A priority queue. Removal is lazy: a request that has left is dropped when it comes up.

    Once more than half have left, all of those are dropped (amortised O(log n) a removal): a first
    request that waits long does not keep the ones that left behind it.
    Keys are unique and stay as they are while the request waits. A request that left from the
    middle (an abort) does not come back. num_tokens: prompt tokens of all who wait.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Key, Request]] = []
        self._waiting: set[int] = set()  # by Request.order; never iterated
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request.order in self._waiting

    def push(self, request: Request, key: Key) -> None:
        self._waiting.add(request.order)
        self.num_tokens += len(request.prompt)
        heapq.heappush(self._heap, (key, request))

    def peek(self) -> Request:
        """The first request. IndexError when nobody waits."""
        return self._heap[0][1]

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands; nothing happens when it does not wait."""
        if request.order in self._waiting:
            self._waiting.discard(request.order)
            self.num_tokens -= len(request.prompt)
        while self._heap and self._heap[0][1].order not in self._waiting:
            heapq.heappop(self._heap)
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [entry for entry in self._heap if entry[1].order in self._waiting]
            heapq.heapify(self._heap)

    def requests(self) -> list[Request]:
        """All of them, in order. O(n log n)."""
        return [r for _, r in sorted(self._heap, key=lambda e: e[0]) if r.order in self._waiting]


class WaitingQueue:
    """Those who were preempted, in one line before all others; then the lines of the policy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._again = Line()
        self._lines: dict[str, Line] = {}  # none of them empty

    def __len__(self) -> int:
        return len(self._again) + sum(map(len, self._lines.values()))

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all who wait."""
        return self._again.num_tokens + sum(line.num_tokens for line in self._lines.values())

    def __contains__(self, request: Request) -> bool:
        return request in self._line(request)

    def push(self, request: Request) -> None:
        line = self._again
        if not request.admitted:
            line = self._lines.setdefault(self._policy.line(request), Line())
        line.push(request, self._policy.key(request))

    def peek(self, now: float) -> Request:
        """The request to be served next. IndexError when nobody waits."""
        if self._again or not self._lines:
            return self._again.peek()
        return self._policy.choose([line.peek() for line in self._lines.values()], now)

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands; nothing happens when it does not wait.

        Before it counts as admitted, if it is taken out for that.
        """
        line = self._line(request)
        line.remove(request)
        if not line and line is not self._again:
            self._lines.pop(self._policy.line(request), None)

    def lines(self) -> list[str]:
        """Lines in which somebody waits."""
        return list(self._lines)

    def requests(self) -> list[Request]:
        """All who wait: the preempted, then line by line, each in its order."""
        lines = [self._again, *self._lines.values()]
        return [request for line in lines for request in line.requests()]

    def _line(self, request: Request) -> Line:
        if request.admitted:
            return self._again
        return self._lines.get(self._policy.line(request), Line())
