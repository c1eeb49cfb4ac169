"""Requests of one tenant that wait."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

from pagedkv.scheduling.request import Request

# Compared with keys of the same policy only; the last item, `Request.order`, makes it unique.
Key = tuple[Any, ...]


class Line:
    """Requests in the order of `key`, which stays as it is while a request waits.

    A sorted list: to come or to go moves the references behind the place, 8 bytes a request.
    """

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._requests: list[Request] = []
        self.num_tokens = 0  # of their prompts
        self.num_samples = 0  # that they were asked for

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return self.first(1, self._place(request)) == [request]

    @property
    def head(self) -> Request:
        """The first request. IndexError when nobody waits."""
        return self._requests[0]

    def first(self, count: int, start: int = 0) -> list[Request]:
        """The first `count` requests from place `start` on, or as many as there are."""
        return self._requests[start : start + count]

    def push(self, request: Request) -> None:
        self._requests.insert(self._place(request), request)
        self.num_tokens += len(request.prompt)
        self.num_samples += len(request.outputs)

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands; nothing happens when it is not here."""
        if request in self:
            del self._requests[self._place(request)]
            self.num_tokens -= len(request.prompt)
            self.num_samples -= len(request.outputs)

    def _place(self, request: Request) -> int:
        return bisect.bisect_left(self._requests, self._key(request), key=self._key)
