"""Which requests are given up when not all first tokens can come in time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.scheduling.chunking import Decodes, waiting_cost
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.cost import CostModel
from pagedkv.scheduling.fit import Float64
from pagedkv.scheduling.messages import Delta
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.roster import Roster
from pagedkv.scheduling.slack import first_due, service_due

# Seconds between two reviews: of the size of a step, far below the time that people wait; and as
# many more for each request that so many of them take a few per cent of the time.
INTERVAL = 0.1
INTERVAL_EACH = 2e-4
# What the work of a request that was given up counts for, so that it comes back only when there is
# room to spare: requests do not go to and fro with every small change of what is predicted.
HYSTERESIS = 1.25


class Job(NamedTuple):
    """Something to be done by `due` on a server that does one thing at a time.

    droppable: whether it may be given up. One that may not is never late: it only takes its time.
    """

    work: float
    due: float
    droppable: bool = True


def moore_hodgson(jobs: Sequence[Job]) -> list[bool]:
    """Which jobs to keep so that as many as possible are done in time; the others are dropped.

    Jobs are served in the order in which they are given: by `due`. When one would be late the
    longest of those so far is dropped, of equal ones the latest (Moore 1968; 1 || sum U_j). If that
    is not enough, as can be after jobs that may not be dropped, the late one itself is. Optimal
    where all may be dropped. Works are above 0. O(n log n).
    """
    kept = [True] * len(jobs)
    longest: list[tuple[float, int]] = []  # (-work, -index) of those kept that may be dropped
    total = 0.0
    for i, job in enumerate(jobs):
        total += job.work
        if not job.droppable:
            continue
        dropped = -job.work, -i
        if total <= job.due:
            heapq.heappush(longest, dropped)
            continue
        if longest and total + longest[0][0] <= job.due:
            dropped = heapq.heappushpop(longest, dropped)
        kept[-dropped[1]] = False
        total += dropped[0]
    return kept


class Overload:
    """Reviews who waits, or runs and has no token yet, in the order in which they are due.

    Those whose first token cannot come in time, as few as possible, are given up: they stand back
    behind all who can be served in time. A later review may take them in again. With
    overload="reject" they end once their first token would be late even if they came next.

    expected_output: tokens that a request that has none yet will bring; by default the median of
    what its tenant's requests brought of late.
    """

    def __init__(self, config: SchedulerConfig, cost: CostModel, roster: Roster) -> None:
        self._config, self._cost, self._roster = config, cost, roster
        self._next = -math.inf  # time of the next review
        self.num_given_up = 0  # since the start; who comes back and is given up again counts twice
        self.expected_output: Callable[[Request], float] = self._median_output

    def review(self, now: float) -> list[Delta]:
        """Does nothing before some time has passed since the last one; O(n log n) then."""
        if now < self._next or not self._cost.fitted:
            return []
        roster = self._roster
        unserved = [r for r in roster.running if not r.started] + roster.waiting.requests()
        self._next = now + max(INTERVAL, INTERVAL_EACH * len(unserved))
        if not unserved:
            return []
        tokens, prefill, whole = self._works(unserved)
        wanted = np.array([math.inf if r.started else first_due(r) for r in unserved])
        hopeless = np.isfinite(wanted) & (now + prefill > wanted)
        droppable = np.isfinite(wanted) & ~hopeless
        served = np.array([service_due(r, self._config.ageing) for r in unserved])
        order = np.argsort(np.where(droppable, wanted, served), kind="stable")
        decodes = Decodes.of(roster.running, self._cost, now)
        extra, step = waiting_cost(decodes, self._cost, self._config.max_num_batched_tokens)
        times = prefill + extra * tokens
        doubt = np.where([r.demoted for r in unserved], HYSTERESIS, 1.0)
        left = wanted - now - step
        kept = np.ones(len(unserved), bool)
        late = (np.cumsum((times * doubt)[order]) > left[order]) & droppable[order]
        if late.any():
            # Who brings more work to come is dropped sooner; all together take what they take.
            works = doubt * (whole * (times.sum() / whole.sum()) if whole.any() else times)
            jobs = [Job(works[i], left[i], bool(droppable[i])) for i in order.tolist()]
            kept[order] = moore_hodgson(jobs)
        return self._carry_out(unserved, kept & ~hopeless, hopeless, prefill, now)

    def _works(self, requests: Sequence[Request]) -> tuple[Float64, Float64, Float64]:
        """Prefill left to each in tokens, in seconds, and in these with its expected output."""
        computed = [sum(branch.computed for branch in r.branches) for r in requests]
        known = [len(r.prompt) + sum(len(o.tokens) for o in r.live) for r in requests]
        prior, lengths = np.array(computed, np.float64), np.array(known, np.float64)
        output = np.array([self.expected_output(r) for r in requests], np.float64)
        tokens = np.maximum(1.0, lengths - prior)
        prefill = self._cost.prefill_seconds_each(tokens, prior)
        return tokens, prefill, prefill + self._cost.decode_seconds_each(output, lengths)

    def _median_output(self, request: Request) -> float:
        cap = request.params.max_tokens or self._config.max_model_len
        return len(request.live) * self._roster.lengths.expected(request.tenant, 0, cap, 0.5)

    def _carry_out(
        self,
        requests: Sequence[Request],
        kept: npt.NDArray[np.bool_],
        hopeless: npt.NDArray[np.bool_],
        prefill: Float64,
        now: float,
    ) -> list[Delta]:
        deltas: list[Delta] = []
        for i in np.flatnonzero(~kept).tolist():
            request = requests[i]
            if not request.demoted:
                self.num_given_up += 1
                self._note("stand_back", request, prefill[i], now)
                self._roster.demote(request, True)
            if hopeless[i] and self._config.overload == "reject":
                error = (
                    f"overload: the first token was wanted within {request.ttft_slo:.6g} s; after "
                    f"{now - request.arrival:.6g} s {prefill[i]:.3g} s of its prompt are left to "
                    f"compute, and {len(requests) - 1} other requests wait for theirs"
                )
                deltas += self._roster.end(request, request.live, "deadline", error, "overload")
        for i in np.flatnonzero(kept).tolist():
            if requests[i].demoted:
                self._note("come_back", requests[i], prefill[i], now)
                self._roster.demote(requests[i], False)
        return deltas

    def _note(self, kind: str, request: Request, prefill: float, now: float) -> None:
        spare = first_due(request) - now
        self._roster.log.note(kind, request.id, spare=spare, prefill=float(prefill))
