"""What a policy decides: who is served next, and who yields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pagedkv.scheduling.line import Key, Line
from pagedkv.scheduling.request import Request


class Policy(Protocol):
    """One object a scheduler. It sees requests and `now` (seconds), and no clock.

    Waiting requests stand in one line a tenant, those that were preempted before the others, both
    in the order of `key`, which stays as it is while a request waits; `choose` says who is next.
    """

    @property
    def aims_at_deadlines(self) -> bool:
        """Whether chunks and what is given up depend on when tokens are due."""
        ...

    def key(self, request: Request) -> Key:
        """Order of service: in its line, and among running prefills."""
        ...

    def choose(self, lines: Sequence[Line], now: float) -> Request:
        """Who is served next. The lines (at least one, none empty) are those of the tenants that
        may start one more request."""
        ...

    def ahead(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Of requests that prefill or are to start those whose prefill goes before the others'."""
        ...

    def yield_class(self, request: Request, now: float) -> tuple[float, ...]:
        """Running requests with the highest numbers give their blocks up first."""
        ...

    def yields_to(
        self,
        request: Request,
        running: Sequence[Request],
        waiting: Sequence[str | None],
        size: Callable[[Request], int],
        total: int,
    ) -> Sequence[Request]:
        """Running requests any of which may be preempted so that `request`, who is next, can start.

        running: in order of service. waiting: tenants with requests that wait. size: what a request
        takes of that which there is too little of, of `total` (token slots, or seats).
        """
        ...

    def joined(self, tenant: str | None, others: Sequence[str | None]) -> None:
        """A tenant begins to compete with `others`, those whose lines `choose` would be given.

        Its first request comes to wait, or it may start one more again.
        """
        ...

    def admitted(self, request: Request, cached_tokens: int, again: bool) -> None:
        """A request starts to run, `again` after a preemption; so many of its tokens are there."""
        ...

    def took_over(self, request: Request) -> None:
        """A request that has run elsewhere comes to wait here, like one that was preempted."""
        ...

    def drew(self, request: Request, tokens: int) -> None:
        """A step has drawn so many tokens for one sample of the request."""
        ...

    def preempted(self, request: Request) -> None:
        """A running request goes back to those that wait."""
        ...

    def left(self, request: Request) -> None:
        """A request has ended, in whatever way."""
        ...
