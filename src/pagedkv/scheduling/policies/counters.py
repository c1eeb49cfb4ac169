"""What tenants have been served, so that it can be made equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pagedkv.scheduling.tenants import TenantTable

_REBASE_AT = 2.0**40  # tokens: far from 2**53, where a double no longer counts single ones
_SPARE = 64


class TokenCounters:
    """Virtual token counters: tokens served to each tenant, weighted, over the tenant's weight.

    The algorithm is VTC (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
    Serve the tenant with the least; one that begins to compete is lifted to the least of those
    that do already, or without any to the one that started a request last: being idle earns
    nothing. The level of the last lift never falls, so a tenant that has no requests and is not
    above it is forgotten: it would be lifted to the level anyway. Nothing else is forgotten.
    """

    def __init__(self, tenants: TenantTable) -> None:
        self._tenants = tenants
        self._counters: dict[str | None, float] = {}  # those not here are at the level
        self._level = 0.0
        self._running: Counter[str | None] = Counter()  # requests started and not ended
        self._last: str | None = None  # whose request started last

    def __getitem__(self, tenant: str | None) -> float:
        """Only differences mean something: all counters fall by the same from time to time."""
        return self._counters.get(tenant, self._level)

    def __len__(self) -> int:
        """Tenants of which something is known."""
        return len(self._counters)

    def num_started(self, tenant: str | None) -> int:
        """Requests of the tenant that have started and not ended."""
        return self._running[tenant]

    def join(self, tenant: str | None, others: Sequence[str | None]) -> None:
        """The tenant begins to compete with others that wait."""
        rivals = [other for other in others if other != tenant]
        if rivals:
            self._level = max(self._level, min(self[rival] for rival in rivals))
        else:
            self._level = max(self._level, self[self._last])
        self._counters[tenant] = max(self[tenant], self._level)
        if len(self._counters) > 2 * (len(rivals) + len(self._running)) + _SPARE:
            self._forget({tenant, *rivals})
        if self._level > _REBASE_AT:
            self._rebase()

    def start(self, tenant: str | None, tokens: float) -> None:
        """A request of the tenant starts and is charged so many weighted tokens."""
        self._running[tenant] += 1
        self._last = tenant
        self.charge(tenant, tokens)

    def charge(self, tenant: str | None, tokens: float) -> None:
        """Weighted tokens that the tenant was given; below 0: that it is given back."""
        self._counters[tenant] = self[tenant] + tokens / self._tenants[tenant].weight

    def end(self, tenant: str | None, unused: float) -> None:
        """A request that was started ends; so many tokens of its charge were never computed."""
        self.charge(tenant, -unused)
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def _forget(self, waiting: set[str | None]) -> None:
        kept = waiting | self._running.keys()
        self._counters = {
            tenant: counter
            for tenant, counter in self._counters.items()
            if counter > self._level or tenant in kept
        }

    def _rebase(self) -> None:
        self._counters = {t: counter - self._level for t, counter in self._counters.items()}
        self._level = 0.0
