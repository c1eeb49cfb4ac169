"""How many tokens a step may compute without making a running decode late."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pagedkv.scheduling.cost import CostModel
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.slack import next_due


class Decodes(NamedTuple):
    """The running decodes: rows of one token, and what bounds the step that they are in.

    slack: seconds to the earliest of their next tokens that the step can still bring in time. pace:
    the shortest time between tokens that any of them wants. Infinity where nothing is wanted.
    """

    num_rows: int
    sum_context: int
    slack: float
    pace: float

    @classmethod
    def of(cls, running: Sequence[Request], cost: CostModel, now: float) -> Decodes:
        count = sum_context = 0
        slacks = []
        pace = math.inf
        for request in running:
            rows = [branch for branch in request.branches if branch.pending == 1]
            count += len(rows)
            sum_context += sum(branch.known for branch in rows)
            due = next_due(request)
            if rows and request.started and request.tpot_slo is not None and math.isfinite(due):
                slacks.append(due - now)
                pace = min(pace, request.tpot_slo)
        shortest = cost.predict(count, sum_context)
        in_time = [slack for slack in slacks if slack >= shortest]
        # A token that is late whatever is done bounds the step by its pace alone.
        late = [pace] if len(in_time) < len(slacks) else []
        return cls(count, sum_context, min([*in_time, *late], default=math.inf), pace)


def step_budget(decodes: Decodes, cost: CostModel, limit: int, prior: int) -> int:
    """Most tokens of a step, at most `limit`, that no decode becomes late for.

    The largest prefill that the cost model, less its usual error, lets into the slack; whole tiles,
    with a floor so that prefills make progress (Sarathi-Serve's token budget, computed afresh for
    each step). prior: tokens before the first chunk. `limit` while the model is not fitted.
    """
    return _budget(decodes, decodes.slack, cost, limit, prior)


def waiting_cost(decodes: Decodes, cost: CostModel, limit: int) -> tuple[float, float]:
    """What a prefill token costs those behind it beyond its own work, and a step, in seconds.

    While there are prefills enough, steps are as long as the shortest pace allows (slack that
    decodes have gained is used up soon); the prefill tokens of a step bear what it takes without
    them: its decodes, and reading the weights.
    """
    base = cost.predict(decodes.num_rows, decodes.sum_context)
    chunk = max(1, _budget(decodes, decodes.pace, cost, limit, 0) - decodes.num_rows)
    return base / chunk, base + cost.prefill_seconds(chunk)


def _budget(decodes: Decodes, target: float, cost: CostModel, limit: int, prior: int) -> int:
    if math.isinf(target):
        return limit
    count, context = decodes.num_rows, decodes.sum_context
    room = max(0, limit - count)
    return count + cost.max_prefill(target / (1 + cost.error), room, count, context, prior)
