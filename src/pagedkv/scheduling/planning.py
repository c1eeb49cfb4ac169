"""What the next step computes, who starts, and who yields."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagedkv.cache import BlockManager
from pagedkv.scheduling.admission import Admission, Demand, Shortage, admission_demand, widen
from pagedkv.scheduling.batch import Row, drop_last, select_rows
from pagedkv.scheduling.chunking import Decodes, step_budget
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.cost import CostModel
from pagedkv.scheduling.decisions import DecisionLog
from pagedkv.scheduling.messages import Delta
from pagedkv.scheduling.policies.shares import num_seats, num_slots
from pagedkv.scheduling.recovery import SWAP
from pagedkv.scheduling.request import Branch, Request
from pagedkv.scheduling.roster import Roster
from pagedkv.scheduling.siblings import Leaders
from pagedkv.scheduling.slack import first_due
from pagedkv.scheduling.turns import Turns
from pagedkv.scheduling.victims import Victim, choose_victim, least_loss


class Planner:
    """Chooses the rows of a step: of those who run, then of those who wait.

    decided: gets the deltas of requests that end on the way, for they outgrow the pool.
    """

    def __init__(
        self,
        manager: BlockManager,
        config: SchedulerConfig,
        roster: Roster,
        cost: CostModel,
        log: DecisionLog,
        decided: list[Delta],
    ) -> None:
        self.manager, self.config, self.cost, self.log = manager, config, cost, log
        self.tiering = roster.tiering
        self._roster, self._deltas = roster, decided
        self._admission = Admission(manager, config, roster.lengths)

    def choose(self, now: float) -> tuple[list[Row], list[Row]]:
        """The rows to be computed, and those to be loaded; all of them fit in the pool."""
        limit = self._step_limit(now)
        rows, loads, budget, short = self._fit_running(limit, now)
        if not short:
            budget = self._admit(rows, loads, budget, now)
            widen(self.manager, rows, loads, budget)
        if limit < self.config.max_num_batched_tokens:
            for row in rows:
                row.limit = "slack" if row.limit == "budget" else row.limit
        return rows, loads

    def _step_limit(self, now: float) -> int:
        """Tokens of the step, at most."""
        limit = self.config.max_num_batched_tokens
        if not self._roster.policy.aims_at_deadlines:
            return limit
        branches = self._roster.branches
        prior = next((branch.computed for branch in branches if branch.pending > 1), 0)
        decodes = Decodes.of(self._roster.running, self.cost, now)
        return step_budget(decodes, self.cost, limit, prior)

    def _fit_running(self, limit: int, now: float) -> tuple[list[Row], list[Row], int, bool]:
        """Rows of the running requests, victims chosen so that they fit in the pool.

        Returns (rows, loads, tokens left of the budget, whether the pool was short).
        """
        roster, tiering = self._roster, self.tiering
        short = False

        def turns(prefills: Sequence[Request]) -> Turns:
            # Asked once, not for each row: a policy looks at the lines of all tenants to answer.
            return Turns.of(roster.policy, prefills, roster.next(now))

        while True:
            rows, budget = select_rows(roster.running, limit, turns, self._prefill_limit)
            loads = [] if tiering is None else tiering.due(roster.branches)
            if self._fits([*rows, *loads]):
                return rows, loads, budget, short
            if tiering is not None and tiering.abandon():
                continue
            short = True
            active = [request for request in roster.running if not request.parked]
            if len(active) > 1 and not self._stores:
                self._preempt([*rows, *loads], now)
            elif self._stores or roster.held_elsewhere:
                # What a victim leaves is on its way out, or what is moved is: who comes last waits.
                last = loads or rows
                while last and not self._fits([*rows, *loads]):
                    drop_last(last)
                    last = loads or rows
                return rows, loads, 0, short
            else:
                self._deltas += roster.cut_short(active[0])

    @property
    def _stores(self) -> bool:
        """Whether blocks that nobody holds any more are being stored below."""
        tiering = self.tiering
        return tiering is not None and tiering.busy and self.manager.num_draining_blocks > 0

    def _fits(self, rows: list[Row]) -> bool:
        # No row takes more than its full blocks, the ends of the first and last, and a copy.
        manager, size = self.manager, self.manager.block_size
        enough = sum([row.count for row in rows]) // size + 3 * len(rows)
        if enough <= manager.num_free_blocks + manager.num_cached_blocks:
            return True
        return manager.can_reserve([r.branch.seq for r in rows], [r.count for r in rows])

    def _preempt(self, rows: list[Row], now: float) -> None:
        """Takes the blocks of one request for the rows of the others."""
        manager = self.manager
        block_bytes = None if self.tiering is None else self.tiering.block_bytes
        available = manager.num_free_blocks + manager.num_cached_blocks
        demand = manager.demand([r.branch.seq for r in rows], [r.count for r in rows])
        victim = choose_victim(
            self._roster, demand - available, self.cost, now, block_bytes, self.config.recovery
        )
        self._send_back(victim, "growth", len(rows), demand)

    def _send_back(self, victim: Victim, reason: str, rows: int, demand: int) -> None:
        """Preempts a request. rows: those that need its blocks, `demand` in all.

        reason: one of PREEMPTION_REASONS.
        """
        manager, (request, recovery) = self.manager, victim
        available = manager.num_free_blocks + manager.num_cached_blocks
        computed = request.num_computed
        self._roster.preempt(request, recovery.blocks if recovery.kind == SWAP else 0)
        self._roster.tally.preempted(recovery.kind, reason)
        self.log.note(
            "preempt",
            request.id,
            how=recovery.kind,
            tokens=computed,
            freed=manager.num_free_blocks + manager.num_cached_blocks - available,
            lost=recovery.blocks,
            seconds=recovery.options if self.cost.fitted else {},
            rows=rows,
            demand=demand,
            available=available,
        )

    def _spare(self, request: Request, now: float) -> float:
        """Seconds until a request has to start, at most, if its first token is not to be late.

        Less two steps: the one that it might wait for, and the one that draws the token.
        """
        if request.ttft_slo is None:
            return math.inf
        step = self.cost.predict(self.config.max_num_batched_tokens)
        prefill = self.cost.prefill_seconds(len(request.prompt))
        return first_due(request) - now - prefill - 2 * step

    def _prefill_limit(self, request: Request, total: int, turns: Turns) -> int:
        """Most tokens that the request may prefill in a step of `total`."""
        policy, first = self._roster.policy, turns.first
        if not policy.aims_at_deadlines:
            return turns.limit(request, total, self._roster.awaiting_first_token)
        # In order, not in equal shares: these would make all first tokens late.
        if first is None or not policy.key(first) < policy.key(request):
            return total
        return max(1, total - len(first.prompt))

    def _admit(self, rows: list[Row], loads: list[Row], budget: int, now: float) -> int:
        """Starts waiting requests, in order, as long as each fits whole; adds their rows.

        Returns what is left of the budget.

        One whose beginning a row of this step computes is passed over: it keeps its place, and its
        seats and blocks are set aside from those who are behind it.
        """
        roster, total = self._roster, self.config.max_num_batched_tokens
        slots = self.manager.num_blocks * self.manager.block_size
        whole = budget + sum(row.count for row in rows)
        waiting = roster.waiting
        if not len(waiting):
            return budget
        leaders = Leaders(self.manager, rows)
        passed: list[Demand] = []
        started = [load.branch.request for load in loads]  # by this plan: nobody's victims
        running = _Totals.of(roster.running, rows, self._admission)
        seats = 0  # set aside
        for held in roster.held_back():
            most = roster.tenants[held.tenant].max_running
            self.log.wait(held.id, "quota", tenant=held.tenant, max_running=most)
        try:
            while budget > 0 and (request := roster.next(now)) is not None:
                if running.samples + seats + len(request.live) > self.config.seats:
                    if self._make_room(request, rows, started, num_seats, self.config.seats):
                        budget, leaders = _unused(rows, whole), Leaders(self.manager, rows)
                        running = _Totals.of(roster.running, rows, self._admission)
                        continue
                    self._log_wait(
                        request,
                        "seats",
                        wanted=len(request.live),
                        aside=seats,
                        seats=self.config.seats,
                    )
                    break
                if request.total_blocks(self.manager.block_size) > self.manager.num_blocks:
                    self._deltas += roster.cut_short(request)
                    continue
                demand = admission_demand(self.manager, request, leaders, self._spare(request, now))
                turns = Turns.of(roster.policy, running.prefills, request)
                share = self._prefill_limit(request, total, turns)
                limit = min(budget, share)
                short = self._admission.shortage(
                    demand, passed, roster.running, [*rows, *loads], limit, running.promised
                )
                if short is not None:
                    if self._make_room(request, rows, started, num_slots, slots, short):
                        budget, leaders = _unused(rows, whole), Leaders(self.manager, rows)
                        running = _Totals.of(roster.running, rows, self._admission)
                        continue
                    self._log_wait(request, short.reason, demand=demand.blocks, **short._asdict())
                    break
                if demand.waits:
                    self._log_wait(request, "sibling", demand=demand.blocks)
                    passed.append(demand)
                    waiting.remove(request)
                    seats += len(request.live)
                    continue
                started.append(request)
                branches = self._start(request, demand, now, running.samples)
                running.samples += len(request.live)
                running.promised += self._admission.most_promised([request])
                branch = branches[0]
                if branch.below and branch.below[0][0] <= branch.computed:
                    self._load(branch, rows, loads)
                    continue
                for row in self._first_rows(branches, budget, share, [*rows, *loads]):
                    budget -= row.count
                    rows.append(row)
                    leaders.add(row)
                if any(branch.pending > 1 for branch in branches):
                    running.prefills.append(request)
        finally:
            for demand in passed:
                demand.request.num_passings += 1
                waiting.push(demand.request)
        return budget

    def _first_rows(
        self, branches: Sequence[Branch], budget: int, share: int, planned: Sequence[Row]
    ) -> list[Row]:
        """Rows of a request that starts. Samples that come back each on a sequence of its own wait
        for the next step, where not all of them fit in this one.
        """
        rows: list[Row] = []
        for branch in branches:
            if not branch.pending:  # a beam that waits for the others
                continue
            row = Row(branch, branch.computed, branch.pending)
            row.cut(budget, share)
            if not row.count:
                return []
            rows.append(row)
            budget, share = budget - row.count, share - row.count
        return rows if len(rows) == 1 or self._fits([*planned, *rows]) else []

    def _load(self, branch: Branch, rows: list[Row], loads: list[Row]) -> None:
        """Adds the load to which a branch has come, as far as it fits in the pool now."""
        size = self.manager.block_size
        for load in [] if self.tiering is None else self.tiering.due([branch]):
            while load.count > 0 and not self._fits([*rows, *loads, load]):
                load.count = (load.start + load.count - 1) // size * size - load.start
            if load.count > 0:
                loads.append(load)

    def _make_room(
        self,
        request: Request,
        rows: list[Row],
        started: Sequence[Request],
        size: Callable[[Request], int],
        total: int,
        short: Shortage | None = None,
    ) -> bool:
        """Preempts one whom the policy lets yield to a waiting request; its rows go.

        Not one that this plan has `started`: everybody has a step between. size, total: of what
        there is too little of, see `Policy.yields_to`; short: blocks.
        """
        roster = self._roster
        waiting = roster.waiting.tenants
        yielding = roster.policy.yields_to(request, roster.running, waiting, size, total)
        yielding = [r for r in yielding if r not in started and not r.parked]
        if not yielding or self.config.admission == "max_tokens":  # which never preempts
            return False
        missing = max(1, short.blocks - short.room) if short is not None else 1
        block_bytes = None if self.tiering is None else self.tiering.block_bytes
        victim = least_loss(roster, yielding, missing, self.cost, block_bytes, self.config.recovery)
        reason = "blocks" if short is not None else "seats"
        self._send_back(victim, reason, 1, short.blocks if short is not None else 0)
        rows[:] = [row for row in rows if row.branch.open]
        return True

    def _log_wait(self, request: Request, reason: str, **numbers: object) -> None:
        """The request was first in line and is not admitted."""
        if not self.log.still_waits(request.id, reason):
            self.log.wait(request.id, reason, **numbers, **self._pool(self._roster.num_samples))

    def _pool(self, taken: int) -> dict[str, int]:
        """Numbers of decisions about admission. taken: seats."""
        return {
            "free": self.manager.num_free_blocks,
            "cached": self.manager.num_cached_blocks,
            "running": len(self._roster.running),
            "taken": taken,
            "waiting": len(self._roster.waiting),
        }

    def _start(self, request: Request, demand: Demand, now: float, taken: int) -> list[Branch]:
        """Opens what the request's samples have in common, or the sequence of each."""
        pool, again = self._pool(taken), request.admitted
        common = request.common_tokens()
        apart = demand.reopening
        lookups = [request.lookup_tokens(common)] if apart is None else apart.tokens
        seqs = [self.manager.open(tokens, request.namespace, request.public) for tokens in lookups]
        branches = self._roster.start(request, seqs, now)
        cached = sum(branch.computed for branch in branches)
        if self.manager.prefix_caching:
            self._roster.tally.looked_up(sum(map(len, lookups)), cached, again)
        if self.tiering is not None and apart is None:
            self.tiering.find(branches[0], lookups[0])
        self.log.note(
            "admit",
            request.id,
            again=again,
            tokens=len(common) if apart is None else sum(map(len, lookups)),
            cached_tokens=cached,
            below_tokens=sum(stop - start for start, stop in branches[0].below),
            demand=demand.blocks,
            **pool,
        )
        return branches


@dataclass(slots=True)
class _Totals:
    """What admission has to know of all who run, kept up while it lets more of them in.

    samples: seats taken. prefills: of the step's rows. promised: see `Admission.most_promised`.
    """

    samples: int
    prefills: list[Request]
    promised: int

    @classmethod
    def of(cls, running: Sequence[Request], rows: Sequence[Row], admission: Admission) -> _Totals:
        return cls(
            sum(len(branch.members) for request in running for branch in request.branches),
            [row.branch.request for row in rows if row.branch.pending > 1],
            admission.most_promised(running),
        )


def _unused(rows: Sequence[Row], budget: int) -> int:
    return budget - sum(row.count for row in rows)
