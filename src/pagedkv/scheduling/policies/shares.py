"""What tenants hold of the pool or the seats, beside what they may by their weights."""

from __future__ import annotations

from collections.abc import Callable

from pagedkv.scheduling.request import Request


def num_slots(request: Request) -> int:
    """Token slots that a request takes for what is known of it."""
    return request.num_known


def num_seats(request: Request) -> int:
    """Sequences that a request runs."""
    return len(request.live)


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

    def fullest(self) -> str | None:
        """The tenant that holds most of its share."""
        return max(self._held, key=lambda tenant: self._held[tenant] / self._shares[tenant])

    def can_spare(self, request: Request, size: Callable[[Request], int]) -> bool:
        """Whether the request's tenant holds its share without it."""
        return self._held[request.tenant] - size(request) >= self._shares[request.tenant]
