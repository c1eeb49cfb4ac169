"""Tenants get equal service, or service by their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagedkv.scheduling.line import Line
from pagedkv.scheduling.policies.counters import TokenCounters
from pagedkv.scheduling.policies.fcfs import Fcfs
from pagedkv.scheduling.policies.shares import Occupancy
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.tenants import TenantTable

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0  # of a token; w_in and w_out of the VTC paper


def modest_lead(pool_tokens: int) -> float:
    """V: weighted tokens that a tenant within its share may be above the least and still go first.

    A sixteenth of 2 * `pool_tokens`: the bound on the difference of service is little larger than
    the paper's.
    """
    return OUTPUT_WEIGHT * pool_tokens / 16


class Fair(Fcfs):
    """The first request of the tenant with the least in its counter is next (see TokenCounters).

    Service is 1 a prompt token, charged when a request first starts, and 2 a token that a step
    draws. Tokens found in the prefix cache count like others: what a tenant gets then does not
    depend on what happens to be cached. What is computed again after a preemption or a move is
    charged to nobody. Prompt tokens that were never computed when a request ends are given back.
    The tenant with the most yields first.

    A tenant that stays within its share of the pool goes before others as long as its counter is at
    most V above the least: a prompt is charged at once, and a tenant that asks for little would
    wait after each until a flood has caught up. If there is no room for it, one of the tenant that
    has most beyond its share is preempted.

    For two tenants of equal weight that both have requests waiting throughout, the difference of
    their service over any time is at most 2 * (U + V), U = max(longest prompt, 2 * tokens of the
    pool): the paper's 2 * U, and V because whoever is charged was at most V above the least.
    V is a sixteenth of 2 * tokens of the pool.
    """

    def __init__(self, tenants: TenantTable, pool_tokens: int) -> None:
        self.counters = TokenCounters(tenants)
        self._lead = modest_lead(pool_tokens)  # V
        self._occupancy = Occupancy(tenants, pool_tokens)

    def choose(self, lines: Sequence[Line], now: float) -> Request:
        """Of equal counters that of the tenant with fewer requests running or preempted."""
        heads = [line.head for line in lines]
        most = min(self.counters[head.tenant] for head in heads) + self._lead
        modest = self._occupancy.modest([h for h in heads if self.counters[h.tenant] <= most])
        return min(
            modest or heads,
            key=lambda head: (
                self.counters[head.tenant],
                self.counters.num_started(head.tenant),
                *self.key(head),
            ),
        )

    def ahead(self, requests: Sequence[Request]) -> Sequence[Request]:
        return self._occupancy.modest(requests)

    def yield_class(self, request: Request, now: float) -> tuple[float, ...]:
        return (self.counters[request.tenant],)

    def yields_to(
        self,
        request: Request,
        running: Sequence[Request],
        waiting: Sequence[str | None],
        size: Callable[[Request], int],
        total: int,
    ) -> Sequence[Request]:
        return self._occupancy.yielding(request, running, waiting, size, total)

    def joined(self, tenant: str | None, others: Sequence[str | None]) -> None:
        self.counters.join(tenant, others)

    def admitted(self, request: Request, cached_tokens: int, again: bool) -> None:
        self._occupancy.start(request)
        if not again:
            self.counters.start(request.tenant, PROMPT_WEIGHT * len(request.prompt))

    def took_over(self, request: Request) -> None:
        self.counters.start(request.tenant, 0.0)

    def drew(self, request: Request, tokens: int) -> None:
        self.counters.charge(request.tenant, OUTPUT_WEIGHT * tokens)

    def preempted(self, request: Request) -> None:
        self._occupancy.stop(request)

    def left(self, request: Request) -> None:
        self._occupancy.stop(request)
        if request.admitted:
            unused = len(request.prompt) - request.num_prefilled
            self.counters.end(request.tenant, PROMPT_WEIGHT * unused)
