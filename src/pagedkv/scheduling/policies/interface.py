"""What a policy decides: who is served next, and who yields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagedkv.scheduling.line import Key, Line
from pagedkv.scheduling.request import Request


class Policy(Protocol):
    """One object a scheduler. It sees requests and `now` (seconds), and no clock.

    Waiting requests stand in one line a tenant, in the order of `key`, which stays as it is while a
    request waits; `choose` says who is next. Requests that were preempted come before all lines,
    by `key`.
    """

    @property
    def aims_at_deadlines(self) -> bool:
        """Whether chunks and what is given up depend on when tokens are due."""
        ...

    def key(self, request: Request) -> Key:
        """Order of service: in its line, among the preempted, and among running prefills."""
        ...

    def choose(self, lines: Sequence[Line], now: float) -> Request:
        """Who is served next. The lines (at least one, none empty) are those of the tenants that
        may start one more request."""
        ...

    def yield_class(self, request: Request, now: float) -> tuple[float, ...]:
        """Running requests with the highest numbers give their blocks up first."""
        ...

    def joined(self, tenant: str | None, others: Sequence[str | None]) -> None:
        """A tenant begins to compete with `others`, those whose lines `choose` would be given.

        Its first request comes to wait, or it may start one more again.
        """
        ...

    def admitted(self, request: Request, cached_tokens: int, again: bool) -> None:
        """A request starts to run, `again` after a preemption; so many of its tokens are there."""
        ...

    def drew(self, request: Request, tokens: int) -> None:
        """A step has drawn so many tokens for one sample of the request."""
        ...

    def left(self, request: Request) -> None:
        """A request has ended, in whatever way."""
        ...
