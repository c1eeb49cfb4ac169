"""Tenants get equal service, and of what they may ask the longest cached prefix goes first."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence

from pagedkv.cache import BlockManager
from pagedkv.scheduling.line import Line
from pagedkv.scheduling.policies.fair import OUTPUT_WEIGHT, PROMPT_WEIGHT, modest_lead
from pagedkv.scheduling.policies.fcfs import Fcfs
from pagedkv.scheduling.policies.shares import Occupancy
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.tenants import TenantTable

QUANTUM = 2048.0  # weighted tokens that a tenant of weight 1 is granted at a time
NUM_CANDIDATES = 32  # requests whose cached prefix is looked up to choose one


class FairPrefix(Fcfs):
    """Deficit longest prefix match (DLPM, Cao et al., arXiv 2501.14312).

    Every tenant may spend what it was granted: only prompt tokens that are computed cost something
    (1 each) and tokens drawn (2 each), so a cached prefix is free. Of the requests of tenants that
    have something left the one with the longest cached prefix is next. When no tenant that waits
    has anything left, all that have nothing get the quantum times their weight, as often as it
    takes. What is computed again after a preemption is charged to nobody; prompt tokens that were
    never computed are given back; the tenant that has overspent most yields first.

    A tenant that begins to wait keeps its debt and no grant. What is known of a tenant that runs
    nothing and owes nothing is forgotten: grants reach those who do not wait too.

    A tenant that stays within its share of the pool goes before others as long as it owes less than
    V, and has room made for it, as under `fair`.

    For two tenants of equal weight that both have requests waiting throughout, the difference of
    their service (what is charged) is over any time at most 2 * (U + V + Q), with Q the quantum, U
    = max(longest prompt, 2 * tokens of the pool) and V a sixteenth of 2 * pool tokens: grants
    find all of them with nothing left, so two get as many but for one, and what is left of them is
    always in (-U - V, Q].

    Prefixes are looked up for the 32 requests at most that are first in their lines, of all tenants
    together; one that has waited `ageing` seconds goes before all that have not, by arrival.
    """

    def __init__(self, tenants: TenantTable, manager: BlockManager, ageing: float) -> None:
        self._tenants, self._manager, self._ageing = tenants, manager, ageing
        pool_tokens = manager.num_blocks * manager.block_size
        self._occupancy = Occupancy(tenants, pool_tokens)
        self._lead = modest_lead(pool_tokens)  # V
        self._left: dict[str | None, float] = {}  # of the grants; those not here have nothing
        self._started: Counter[str | None] = Counter()  # requests started and not ended

    def choose(self, lines: Sequence[Line], now: float) -> Request:
        self._grant([line.head.tenant for line in lines])
        heads = [line.head for line in lines]
        modest = self._occupancy.modest(
            [head for head in heads if self.left_over(head.tenant) > -self._lead]
        )
        served = {head.tenant for head in modest}
        if not served:
            served = {head.tenant for head in heads if self.left_over(head.tenant) > 0}
        candidates = self._candidates([line for line in lines if line.head.tenant in served])
        if now - candidates[0].arrival >= self._ageing:
            return candidates[0]
        return min(candidates, key=lambda request: (-self._cached(request), *self.key(request)))

    def left_over(self, tenant: str | None) -> float:
        """What the tenant may still spend, in weighted tokens over its weight; below 0: it owes."""
        return self._left.get(tenant, 0.0)

    def ahead(self, requests: Sequence[Request]) -> Sequence[Request]:
        return self._occupancy.modest(requests)

    def yield_class(self, request: Request, now: float) -> tuple[float, ...]:
        return (-self.left_over(request.tenant),)

    def joined(self, tenant: str | None, others: Sequence[str | None]) -> None:
        self._left[tenant] = min(0.0, self.left_over(tenant))
        kept = {tenant, *others, *self._started}
        if len(self._left) > 2 * len(kept) + 64:
            self._left = {t: left for t, left in self._left.items() if left < 0 or t in kept}

    def yields_to(
        self,
        request: Request,
        running: Sequence[Request],
        waiting: Sequence[str | None],
        size: Callable[[Request], int],
        total: int,
    ) -> Sequence[Request]:
        return self._occupancy.yielding(request, running, waiting, size, total)

    def admitted(self, request: Request, cached_tokens: int, again: bool) -> None:
        self._occupancy.start(request)
        if not again:
            self._started[request.tenant] += 1
            self._charge(request, PROMPT_WEIGHT * (len(request.prompt) - cached_tokens))

    def took_over(self, request: Request) -> None:
        self._started[request.tenant] += 1

    def preempted(self, request: Request) -> None:
        self._occupancy.stop(request)

    def drew(self, request: Request, tokens: int) -> None:
        self._charge(request, OUTPUT_WEIGHT * tokens)

    def left(self, request: Request) -> None:
        self._occupancy.stop(request)
        if request.admitted:
            self._charge(request, PROMPT_WEIGHT * (request.num_prefilled - len(request.prompt)))
            self._started[request.tenant] -= 1
            if not self._started[request.tenant]:
                del self._started[request.tenant]

    def _charge(self, request: Request, tokens: float) -> None:
        weight = self._tenants[request.tenant].weight
        self._left[request.tenant] = self.left_over(request.tenant) - tokens / weight

    def _grant(self, waiting: Sequence[str | None]) -> None:
        """Grants until a tenant that waits has something to spend."""
        richest = max(self.left_over(tenant) for tenant in waiting)
        if richest > 0:
            return
        rounds = math.floor(-richest / QUANTUM) + 1
        for tenant in waiting:
            self._left.setdefault(tenant, 0.0)
        for tenant, left in self._left.items():
            if left <= 0:
                needed = math.floor(-left / QUANTUM) + 1  # rounds after which it has something
                self._left[tenant] = left + QUANTUM * min(rounds, needed)

    def _candidates(self, lines: Sequence[Line]) -> list[Request]:
        """The first requests of the lines, by arrival; a preempted one alone of its line."""
        each = max(1, NUM_CANDIDATES // len(lines))
        first = (r for line in lines for r in line.first(1 if line.head.admitted else each))
        return heapq.nsmallest(NUM_CANDIDATES, first, key=self.key)

    def _cached(self, request: Request) -> int:
        lookup = request.lookup_tokens(request.common_tokens())
        return self._manager.match(lookup, request.namespace, request.public).cached_tokens
