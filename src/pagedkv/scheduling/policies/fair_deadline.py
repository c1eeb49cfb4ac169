"""Tenants get equal service, and inside a tenant who is due first comes first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pagedkv.scheduling.cost import CostModel
from pagedkv.scheduling.line import Key, Line
from pagedkv.scheduling.policies.deadline import Deadline
from pagedkv.scheduling.policies.fair import Fair
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.slack import first_due
from pagedkv.scheduling.tenants import TenantTable


class FairDeadline(Fair):
    """The tenant with the least in its counter is next, with its request that is due first.

    Urgent override: before that the first request of any other tenant, if it has less than
    `urgent_slack` seconds to wait until it must start, and its tenant's counter is at most
    `urgent_service` above that of the tenant that is next; of several the one that is due first.

    The price: for two tenants of equal weight that both have requests waiting throughout, the
    difference of their service is at most 2 * (U + V + urgent_service) instead of 2 * (U + V) (see
    Fair): whoever is charged was at most V + `urgent_service` above the least. Service is counted
    as in Fair, 1 a prompt token and 2 an output token, over the tenant's weight.
    """

    aims_at_deadlines = True

    def __init__(
        self,
        tenants: TenantTable,
        pool_tokens: int,
        deadline: Deadline,
        cost: CostModel,
        urgent_slack: float,
        urgent_service: float,
    ) -> None:
        super().__init__(tenants, pool_tokens)
        self._deadline, self._cost = deadline, cost
        self._urgent_slack, self._urgent_service = urgent_slack, urgent_service

    def key(self, request: Request) -> Key:
        return self._deadline.key(request)

    def choose(self, lines: Sequence[Line], now: float) -> Request:
        fair = super().choose(lines, now)
        most = self.counters[fair.tenant] + self._urgent_service
        urgent = [
            line.head
            for line in lines
            if self.counters[line.head.tenant] <= most and self._is_urgent(line.head, now)
        ]
        return min(urgent, key=self.key, default=fair)

    def ahead(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Nobody: prefills go on in the order in which they are due."""
        return ()

    def yield_class(self, request: Request, now: float) -> tuple[float, ...]:
        """The tenant with the most yields first, and its request with the most slack."""
        return *super().yield_class(request, now), *self._deadline.yield_class(request, now)

    def _is_urgent(self, request: Request, now: float) -> bool:
        due = math.inf if request.demoted else first_due(request)
        prefill = self._cost.prefill_seconds(len(request.prompt))
        return due - now - prefill < self._urgent_slack
