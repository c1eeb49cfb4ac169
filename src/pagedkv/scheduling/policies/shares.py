"""What tenants hold of the pool or the seats, beside what they may by their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagedkv.scheduling.request import Request
from pagedkv.scheduling.tenants import TenantTable


def num_slots(request: Request) -> int:
    """Token slots that a request takes for what is known of it."""
    return request.num_known


def num_seats(request: Request) -> int:
    """Sequences that a request runs."""
    return len(request.live)


class Occupancy:
    """Who runs, and which tenants keep within their shares.

    A flood takes all room that is free. A tenant that asks for little would wait until something of
    it ends; so it goes first, within the bounds of the policy, and if there is no room for it, one
    of the tenant that has most beyond its share yields.
    """

    def __init__(self, tenants: TenantTable, pool_tokens: int) -> None:
        self._tenants, self._pool_tokens = tenants, pool_tokens
        self._running: dict[int, Request] = {}  # by Request.order

    def start(self, request: Request) -> None:
        self._running[request.order] = request

    def stop(self, request: Request) -> None:
        """Nothing happens when it does not run."""
        self._running.pop(request.order, None)

    def modest(self, requests: Sequence[Request]) -> list[Request]:
        """Those within their tenants' shares of slots; one that waits as if it ran, alone."""
        shares = self._shares([r.tenant for r in requests], num_slots, self._pool_tokens)
        return [
            r
            for r in requests
            if (shares.keeps(r) if r.order in self._running else shares.has_room(r, num_slots))
        ]

    def yielding(
        self,
        request: Request,
        running: Sequence[Request],
        waiting: Sequence[str | None],
        size: Callable[[Request], int],
        total: int,
    ) -> list[Request]:
        """See `Policy.yields_to`. Nobody, unless the request is within its tenant's share.

        Who yields keeps its share too: tenants that all want more take nothing from each other.
        """
        shares = self._shares([request.tenant, *waiting], size, total)
        if not shares.has_room(request, size):
            return []
        most = shares.fullest()
        return [r for r in running[1:] if r.tenant == most and shares.can_spare(r, size)]

    def _shares(
        self, waiting: Sequence[str | None], size: Callable[[Request], int], total: int
    ) -> Shares:
        held = dict.fromkeys(waiting, 0)
        for request in self._running.values():
            held[request.tenant] = held.get(request.tenant, 0) + size(request)
        weights = {tenant: self._tenants[tenant].weight for tenant in held}
        return Shares(held, weights, total)


class Shares:
    """held: by tenant, of all that wait or run. total: what there is, shared by `weights`."""

    def __init__(
        self, held: dict[str | None, int], weights: dict[str | None, float], total: int
    ) -> None:
        self._held = held
        unit = total / sum(weights.values())
        self._shares = {tenant: unit * weight for tenant, weight in weights.items()}

    def has_room(self, request: Request, size: Callable[[Request], int]) -> bool:
        """Whether the request's tenant stays within its share with it."""
        tenant = request.tenant
        return self._held[tenant] + size(request) <= self._shares[tenant]

    def keeps(self, request: Request) -> bool:
        """Whether the tenant of a request that runs is within its share."""
        return self._held[request.tenant] <= self._shares[request.tenant]

    def fullest(self) -> str | None:
        """The tenant that holds most of its share."""
        return max(self._held, key=lambda tenant: self._held[tenant] / self._shares[tenant])

    def can_spare(self, request: Request, size: Callable[[Request], int]) -> bool:
        """Whether the request's tenant holds its share without it."""
        return self._held[request.tenant] - size(request) >= self._shares[request.tenant]
