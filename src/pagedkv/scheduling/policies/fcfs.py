"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from pagedkv.scheduling.request import Request

# Steps that a request may wait for others to compute the beginning of its prompt.
MAX_PASSINGS = 8

WaitingKey = tuple[bool, float, int]


def rank(request: Request) -> tuple[float, int]:
    """Order of service: by arrival; `order` (the order of `add`) decides between equals."""
    return request.arrival, request.order


def waiting_key(request: Request) -> WaitingKey:
    """Order of the waiting queue: who has been admitted before (and preempted) comes first."""
    return (not request.admitted, *rank(request))


def may_wait(request: Request) -> bool:
    """Whether a request may be passed over once more, for another computes part of it.

    The one place that decides it; a deadline, which no request has, would be looked at here.
    """
    return request.num_passings < MAX_PASSINGS


def victim(running: Sequence[Request]) -> Request:
    """Who yields its blocks: the latest arrival, so that the oldest always makes progress."""
    return max(running, key=rank)


def prefill_limit(budget: int, others_wait: bool) -> int:
    """Most tokens one request may prefill in a step of `budget` tokens.

    While another request waits for its first token a long prompt leaves half of the step to it.
    """
    return max(1, budget // 2) if others_wait else budget
