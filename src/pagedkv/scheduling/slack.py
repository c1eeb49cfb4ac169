"""When the tokens of a request are wanted, in seconds on the clock of its arrival.

    d(1) = arrival + ttft_slo        d(k) = d(1) + (k - 1) * tpot_slo

A token that comes early leaves more time to the next one. A first token that comes late, or for
which no time was set, moves all that follow it. Nothing set: infinity.
"""

from __future__ import annotations

import math

from pagedkv.scheduling.request import Request


def first_due(request: Request) -> float:
    """d(1)."""
    return math.inf if request.ttft_slo is None else request.arrival + request.ttft_slo


def next_due(request: Request) -> float:
    """d(g + 1) of the sample with the fewest tokens g; d(1) before the first token is drawn.

    A search reports nothing before its end, so its tokens are not wanted one by one.
    """
    if request.first_token_at is None:
        return first_due(request)
    if request.tpot_slo is None or request.search is not None:
        return math.inf
    start = request.first_token_at
    if request.ttft_slo is not None:
        start = max(start, first_due(request))
    return start + min(len(output.tokens) for output in request.live) * request.tpot_slo


def service_due(request: Request, ageing: float) -> float:
    """By when a request is to be served: d(1), and for those of which nothing is wanted, or who
    were given up, `ageing` seconds after they came. So everyone's turn comes.
    """
    due = first_due(request)
    if math.isinf(due):
        return request.arrival + ageing
    return max(due, request.arrival + ageing) if request.demoted else due
