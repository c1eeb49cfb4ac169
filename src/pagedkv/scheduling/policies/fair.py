"""Tenants get equal service, or service by their weights."""

from __future__ import annotations

from collections.abc import Sequence

from pagedkv.scheduling.line import Line
from pagedkv.scheduling.policies.counters import TokenCounters
from pagedkv.scheduling.policies.fcfs import Fcfs
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.tenants import TenantTable

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0  # of a token; w_in and w_out of the paper


class Fair(Fcfs):
    """The first request of the tenant with the least in its counter is next (see TokenCounters).

    Service is 1 a prompt token, charged when a request first starts, and 2 a token that a step
    draws. Tokens found in the prefix cache count like others: what a tenant gets then does not
    depend on what happens to be cached. What is computed again after a preemption is charged to
    nobody. Prompt tokens that were never computed when a request ends are given back.

    For two tenants of equal weight that both have requests waiting throughout, the difference of
    their service over any time is at most 2 * max(1 * longest prompt, 2 * tokens of the pool), as
    the paper proves, when what runs fits in the pool. The tenant with the most yields first.
    """

    def __init__(self, tenants: TenantTable) -> None:
        self.counters = TokenCounters(tenants)

    def choose(self, lines: Sequence[Line], now: float) -> Request:
        """Of equal counters that of the earlier head."""
        heads = (line.head for line in lines)
        return min(heads, key=lambda head: (self.counters[head.tenant], *self.key(head)))

    def yield_class(self, request: Request, now: float) -> tuple[float, ...]:
        return (self.counters[request.tenant],)

    def joined(self, tenant: str | None, others: Sequence[str | None]) -> None:
        self.counters.join(tenant, others)

    def admitted(self, request: Request, cached_tokens: int, again: bool) -> None:
        if not again:
            self.counters.start(request.tenant, PROMPT_WEIGHT * len(request.prompt))

    def drew(self, request: Request, tokens: int) -> None:
        self.counters.charge(request.tenant, OUTPUT_WEIGHT * tokens)

    def left(self, request: Request) -> None:
        if request.admitted:
            unused = len(request.prompt) - request.num_prefilled
            self.counters.end(request.tenant, PROMPT_WEIGHT * unused)
