"""What a policy decides: who is served next, and who yields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pagedkv.scheduling.request import Request

# Compared with keys of the same policy only; the last item, `Request.order`, makes it unique.
Key = tuple[Any, ...]


class Policy(Protocol):
    """One object a scheduler. It sees requests and `now` (seconds), and no clock.

    Waiting requests stand in lines. Inside a line they are served by `key`, which stays as it is
    while a request waits; `choose` says which line's first request is next. Requests that were
    preempted come before all lines, by `key`.
    """

    def key(self, request: Request) -> Key:
        """Order of service: in its line, among the preempted, and among running prefills."""
        ...

    def line(self, request: Request) -> str:
        """The line in which a request waits: always the same one for it."""
        ...

    def choose(self, heads: Sequence[Request], now: float) -> Request:
        """Which of the first requests of the lines (at least one) is served next."""
        ...

    def yield_class(self, request: Request, now: float) -> float:
        """Running requests with the highest number give their blocks up first."""
        ...

    def arrived(self, request: Request, lines: Sequence[str], now: float) -> None:
        """A new request is about to wait. `lines`: those that have requests now."""
        ...

    def admitted(self, request: Request, cached_tokens: int, again: bool) -> None:
        """A request starts to run, `again` after a preemption; so many of its tokens are there."""
        ...

    def drew(self, request: Request, tokens: int) -> None:
        """A step has drawn so many tokens for all samples of the request together."""
        ...

    def left(self, request: Request) -> None:
        """A request has ended, in whatever way."""
        ...
