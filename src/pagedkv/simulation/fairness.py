"""How equally tenants were served, measured from what came out of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagedkv.scheduling.messages import Delta
from pagedkv.scheduling.policies.fair import OUTPUT_WEIGHT, PROMPT_WEIGHT
from pagedkv.simulation.trace import Trace

Float64 = npt.NDArray[np.float64]


class ServiceLog:
    """Service of each tenant over time: 1 a prompt token at the start of its request, 2 a token.

    `observe` is for `serve`: it is given deltas of requests that are named by their place in the
    trace. Service that a reused prefix saves is counted as if it had been computed, unless
    `computed_only`.
    """

    def __init__(self, trace: Trace, *, computed_only: bool = False) -> None:
        if trace.arrivals is None or trace.tenants is None:
            raise ValueError("a trace with arrivals and tenants is needed")
        self._trace, self._tenants, self._arrivals = trace, trace.tenants, trace.arrivals
        self._computed_only = computed_only
        self._starts: dict[int, float] = {}  # of requests, in seconds
        self._times: dict[str, list[float]] = defaultdict(list)
        self._amounts: dict[str, list[float]] = defaultdict(list)

    def observe(self, delta: Delta, now: float) -> None:
        request = int(delta.request_id)
        tenant = self._tenants[request]
        if request not in self._starts and delta.admitted_at is not None:
            self._starts[request] = delta.admitted_at
            cached = delta.num_cached_tokens if self._computed_only else 0
            prompt = int(self._trace.prompt_tokens[request]) - cached
            self._note(tenant, delta.admitted_at, PROMPT_WEIGHT * prompt)
        if delta.token_ids:
            self._note(tenant, now, OUTPUT_WEIGHT * len(delta.token_ids))

    def service(self, tenant: str, start: float = -np.inf, end: float = np.inf) -> float:
        """What the tenant was given in [start, end)."""
        times = np.array(self._times[tenant])
        inside = (times >= start) & (times < end)
        return float(np.array(self._amounts[tenant])[inside].sum())

    def backlogged(self, tenant: str) -> list[tuple[float, float]]:
        """The longest times [start, end) in which the tenant always has a request waiting.

        A request waits until it starts; one that never does waits for ever.
        """
        waits = [
            (float(arrival), self._starts.get(i, np.inf))
            for i, arrival in enumerate(self._arrivals)
            if self._tenants[i] == tenant
        ]
        merged: list[tuple[float, float]] = []
        for start, end in sorted(waits):
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((start, end))
        return merged

    def largest_gap(self, a: str, b: str) -> float:
        """The largest difference of service, of all windows in which both are backlogged.

        With D(t) the difference since the start of such a time, that of a window [t1, t2) is
        D(t2) - D(t1): the largest is max D - min D.
        """
        times = np.concatenate([self._times[a], self._times[b]])
        amounts = np.concatenate([self._amounts[a], np.negative(self._amounts[b])])
        order = np.argsort(times, kind="stable")
        times, amounts = times[order], amounts[order]
        worst = 0.0
        for start, end in _intersect(self.backlogged(a), self.backlogged(b)):
            inside = slice(*np.searchsorted(times, [start, end]).tolist())
            difference = np.concatenate([[0.0], np.cumsum(amounts[inside])])
            worst = max(worst, float(difference.max() - difference.min()))
        return worst

    def _note(self, tenant: str, time: float, amount: float) -> None:
        self._times[tenant].append(time)
        self._amounts[tenant].append(amount)


def _intersect(
    left: Sequence[tuple[float, float]], right: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Times that are in both lists of disjoint ascending times."""
    common, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common
