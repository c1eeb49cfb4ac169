"""First come, first served."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagedkv.scheduling.line import Key, Line
from pagedkv.scheduling.request import Request


class Fcfs:
    """By arrival, whoever the tenant. Policies that differ in a few points are made from it."""

    aims_at_deadlines = False

    def key(self, request: Request) -> Key:
        """By arrival; `order` (the order of `add`) decides between equals."""
        return request.arrival, request.order

    def choose(self, lines: Sequence[Line], now: float) -> Request:
        """Those preempted come first, of whatever tenant."""
        heads = (line.head for line in lines)
        return min(heads, key=lambda head: (not head.admitted, *self.key(head)))

    def ahead(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Nobody: all go on in order."""
        return ()

    def yield_class(self, request: Request, now: float) -> tuple[float, ...]:
        return ()

    def yields_to(
        self,
        request: Request,
        running: Sequence[Request],
        waiting: Sequence[str | None],
        size: Callable[[Request], int],
        total: int,
    ) -> Sequence[Request]:
        """Nobody: who is let in stays until blocks run out."""
        return ()

    def joined(self, tenant: str | None, others: Sequence[str | None]) -> None:
        """Nothing is counted."""

    def admitted(self, request: Request, cached_tokens: int, again: bool) -> None:
        """Nothing is counted."""

    def took_over(self, request: Request) -> None:
        pass

    def drew(self, request: Request, tokens: int) -> None:
        """Nothing is counted."""

    def preempted(self, request: Request) -> None:
        """Nothing is counted."""

    def left(self, request: Request) -> None:
        """Nothing is counted."""
