"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from pagedkv.scheduling.policies.interface import Key
from pagedkv.scheduling.request import Request


class Fcfs:
    """One line, by arrival. Policies that differ in a few points are made from it."""

    def key(self, request: Request) -> Key:
        """By arrival; `order` (the order of `add`) decides between equals."""
        return request.arrival, request.order

    def line(self, request: Request) -> str:
        return ""

    def choose(self, heads: Sequence[Request], now: float) -> Request:
        return heads[0]

    def yield_class(self, request: Request, now: float) -> float:
        return 0.0

    def arrived(self, request: Request, lines: Sequence[str], now: float) -> None:
        """Nothing is counted."""

    def admitted(self, request: Request, cached_tokens: int, again: bool) -> None:
        """Nothing is counted."""

    def drew(self, request: Request, tokens: int) -> None:
        """Nothing is counted."""

    def left(self, request: Request) -> None:
        """Nothing is counted."""
