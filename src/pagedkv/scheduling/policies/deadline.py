"""Earliest deadline first."""

from __future__ import annotations

import math

from pagedkv.scheduling.cost import CostModel
from pagedkv.scheduling.line import Key
from pagedkv.scheduling.policies.fcfs import Fcfs
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.slack import next_due, service_due


class Deadline(Fcfs):
    """Whose first token is due first is served first: optimal while all can be served in time.

    Requests without `ttft_slo`, and those given up in overload, are best effort: they are served as
    if they were due `ageing` seconds after their arrival. So what comes more than `ageing` after a
    request, and after its own target, is never served before it.
    """

    aims_at_deadlines = True

    def __init__(self, ageing: float, cost: CostModel) -> None:
        self._ageing, self._cost = ageing, cost

    def key(self, request: Request) -> Key:
        return service_due(request, self._ageing), request.order

    def yield_class(self, request: Request, now: float) -> tuple[float, ...]:
        """Slack that is left after coming back: who can best afford it yields first.

        Infinity where nothing more is wanted in time.
        """
        due = math.inf if request.demoted else next_due(request)
        if math.isinf(due):
            return (due,)
        computed = sum(branch.computed for branch in request.branches)
        left = sum(branch.known - branch.computed for branch in request.branches)
        return (due - now - self._cost.recompute_seconds(computed + left),)
