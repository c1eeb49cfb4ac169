"""Iteration-level batching over the block manager: plan a step, commit its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pagedkv.cache import BlockManager, SeqId
from pagedkv.errors import ConfigError, PagedKVError, RequestError
from pagedkv.scheduling.admission import Admission, Demand, Shortage, admission_demand, widen
from pagedkv.scheduling.batch import Batch, Row, drop_last, make_batch, prefill_limit, select_rows
from pagedkv.scheduling.beams import start_search
from pagedkv.scheduling.chunking import Decodes, step_budget
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.cost import CostModel, StepFeatures
from pagedkv.scheduling.decisions import DecisionLog
from pagedkv.scheduling.expiry import Expiry
from pagedkv.scheduling.messages import Abort, Add, Delta
from pagedkv.scheduling.namespaces import public_length
from pagedkv.scheduling.overload import Overload
from pagedkv.scheduling.policies import make_policy
from pagedkv.scheduling.policies.shares import num_seats, num_slots
from pagedkv.scheduling.recovery import SWAP
from pagedkv.scheduling.request import Branch, Request
from pagedkv.scheduling.results import take_result
from pagedkv.scheduling.roster import Roster
from pagedkv.scheduling.siblings import Leaders
from pagedkv.scheduling.slack import first_due
from pagedkv.scheduling.step import Result, Step
from pagedkv.scheduling.tenants import TenantTable
from pagedkv.scheduling.tiering import LowerTiers, Tiering
from pagedkv.scheduling.validate import check_queue, result_mismatch, validate_add
from pagedkv.scheduling.victims import Victim, choose_victim, least_loss


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts of requests now, and of preemptions since the start."""

    num_running: int
    num_waiting: int
    num_preemptions: int


class Scheduler:
    """Decides what every step computes and who yields when blocks run out.

    It sees ids and counts, never a tensor; `now` is an argument (seconds), no clock is read and
    no random number drawn: the same calls give the same decisions, block ids included. One step
    is in flight at most. Not thread-safe. The manager must be used by nobody else meanwhile.
    `cost`: what steps take, as their Results have reported.
    """

    def __init__(
        self, manager: BlockManager, config: SchedulerConfig, lower: LowerTiers | None = None
    ) -> None:
        if manager.max_seqs < config.seats:
            raise ConfigError(
                f"max_num_seqs={config.max_num_seqs} lets {config.seats} sequences run at once and "
                f"the block table has max_seqs={manager.max_seqs}: make them equal"
            )
        self.manager = manager
        self.config = config
        self.log = DecisionLog(config.decision_log)
        self.cost = CostModel()
        self.tiering = (
            None if lower is None else Tiering(manager, lower, self.cost, config.recovery)
        )
        tenants = TenantTable(config.tenants, config.default_tenant)
        policy = make_policy(config, tenants, self.cost, manager)
        self._roster = Roster(manager, policy, self.log, tenants, self.tiering)
        self._expiry = Expiry()
        self.overload = Overload(config, self.cost, self._roster)
        self._admission = Admission(manager, config, self._roster.lengths)
        self._flight: Batch | None = None
        self._deltas: list[Delta] = []  # decided, and not handed out yet
        self._draining = False
        self._num_added = 0
        self._num_steps = 0
        self._stamp = manager.stamp()  # tables up to here are known to the executor
        # Tokens the longest sequence can hold: a known token beyond could never be computed.
        self._capacity = min(manager.num_blocks, manager.max_blocks_per_seq) * manager.block_size

    # Messages

    def validate(self, add: Add) -> None:
        """Raises RequestError if the request can never run or may not enter now."""
        if self._draining:
            raise RequestError("the engine is draining: send the request elsewhere")
        manager = self.manager
        blocks = min(manager.num_blocks, manager.max_blocks_per_seq)
        validate_add(add, self.config, blocks, manager.block_size)
        waiting = self._roster.waiting
        check_queue(add, self.config, len(waiting), waiting.num_tokens)
        self._roster.check_quota(add)

    def add(self, add: Add, now: float) -> list[Delta]:
        """Queues a request. One that cannot be accepted gets its terminal deltas at once.

        RequestError: a request with this id is still here (a delta could not tell them apart).
        """
        self.log.at(self._num_steps, now)
        if add.request_id in self._roster.requests:
            raise RequestError(f"request_id {add.request_id!r} is in use: choose another")
        try:
            self.validate(add)
        except RequestError as error:
            self.log.note("refuse", add.request_id, message=str(error))
            return [
                Delta(add.request_id, i, finish_reason="error", error=str(error))
                for i in range(add.params.n)
            ]
        public = public_length(add.prompt, self.config.public_prefixes)
        request = Request(add, self._num_added, start_search(add, self.config), public)
        self._num_added += 1
        self.log.note(
            "arrive",
            request.id,
            tenant=add.tenant,
            prompt=len(request.prompt),
            samples=len(request.outputs),
            waiting=len(self._roster.waiting),
            running=len(self._roster.running),
        )
        self._roster.enter(request)
        self._expiry.watch(request)
        return []

    def abort(self, abort: Abort, now: float | None = None) -> list[Delta]:
        """Ends a request or one of its samples, in any state; blocks are released at once.

        Unknown ids and samples that have ended are ignored. now: for the log.
        """
        if now is not None:
            self.log.at(self._num_steps, now)
        request = self._roster.requests.get(abort.request_id)
        if request is None:
            return []
        whole = abort.sample is None or request.search is not None
        which = [o for o in request.live if whole or abort.sample == o.index]
        return self._roster.end(request, which, abort.reason)

    def drain(self) -> None:
        """Accepts nothing more; what is here is finished."""
        self._draining = True

    def finish(self) -> None:
        """Nothing more comes: the log gets what steps took, and the waits that go on."""
        self.log.note("cost", **self.cost.describe())
        self.log.finish()

    # Steps

    def plan(self, now: float) -> Step | None:
        """The next step, its slots reserved. None: nothing to compute.

        May end requests that have outgrown the pool or their deadline: see `take_deltas`.
        """
        if self._flight is not None:
            raise PagedKVError(f"step {self._flight.step.index} is in flight: commit it first")
        if self.manager.sanitizer is not None:
            self.manager.sanitizer.begin_step(self._num_steps)
        self.log.at(self._num_steps, now)
        self._deltas += self._expiry.end_expired(self._roster, now)
        if self._roster.policy.aims_at_deadlines:
            self._deltas += self.overload.review(now)
        limit = self._step_limit(now)
        rows, loads, budget, short = self._fit_running(limit, now)
        if not short:
            budget = self._admit(rows, loads, budget, now)
            widen(self.manager, rows, loads, budget)
        if limit < self.config.max_num_batched_tokens:
            for row in rows:
                row.limit = "slack" if row.limit == "budget" else row.limit
        if not rows and not loads and not self._transfers:
            return None
        everything = [*rows, *loads]
        reservation = self.manager.reserve(
            [row.branch.seq for row in everything],
            np.array([row.count for row in everything], np.int64),
        )
        self._flight = make_batch(
            self.manager,
            self._num_steps,
            rows,
            reservation,
            self._stamp,
            self.config.eos_token_ids,
            stores=() if self.tiering is None else self.tiering.store(),
            loads=() if self.tiering is None else tuple(map(self.tiering.load, loads)),
        )
        self.log.planned(self._flight.step, rows, self._roster.running)
        self._num_steps += 1
        return self._flight.step

    def take_deltas(self) -> list[Delta]:
        """Deltas that `plan` has decided since the last call, or `fail` before it raised."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def commit(self, result: Result, now: float) -> list[Delta]:
        """Takes what the step in flight has produced. A Result that does not fit is a failure."""
        flight = self._in_flight()
        self.log.at(flight.step.index, now)
        mismatch = result_mismatch(flight.step, result, self.config.vocab_size)
        if not mismatch and self.tiering is not None:
            mismatch = self.tiering.mismatch(result)
        if mismatch:
            return self.fail(mismatch, now)
        self._flight = None
        self._stamp = flight.stamp
        self.cost.observe(StepFeatures.of(flight.step), result.duration)
        return take_result(self._roster, flight, result, self.config, self._capacity, now)

    def fail(self, message: str, now: float) -> list[Delta]:
        """The step in flight went wrong as a whole: its requests end, the others go on.

        Nothing of the step is committed or published. InvariantError: the pool is damaged; the
        deltas are left to `take_deltas` then.
        """
        flight = self._in_flight()
        self._flight = None
        self.log.at(flight.step.index, now)
        self.log.note("fail", message=message)
        self.manager.cancel([row.branch.seq for row in flight.rows if row.branch.open])
        if self.tiering is not None:
            self.tiering.forget()
        for row in flight.rows:
            request = row.branch.request
            self._deltas += self._roster.end(request, request.live, "error", message)
        self.manager.check()
        return self.take_deltas()

    @property
    def stats(self) -> SchedulerStats:
        roster = self._roster
        return SchedulerStats(len(roster.running), len(roster.waiting), roster.num_preemptions)

    @property
    def num_samples(self) -> int:
        """Live samples of the running requests: seats taken."""
        return self._roster.num_samples

    @property
    def sequences(self) -> list[SeqId]:
        """Ids of the open sequences, by request in order of service."""
        return [branch.seq for branch in self._roster.branches]

    @property
    def sharers(self) -> dict[SeqId, int]:
        """For each open sequence the number of live samples that have it in common."""
        return {branch.seq: len(branch.members) for branch in self._roster.branches}

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do: for a request, or for a transfer."""
        return len(self) > 0 or self._transfers

    @property
    def _transfers(self) -> bool:
        return self.tiering is not None and self.tiering.busy

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._roster.requests

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._roster.requests)

    # Planning

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

        def most_tokens(request: Request, total: int) -> int:
            return self._prefill_limit(request, total, now)

        while True:
            rows, budget = select_rows(roster.running, limit, most_tokens)
            loads = [] if tiering is None else tiering.due(roster.branches)
            if self._fits([*rows, *loads]):
                return rows, loads, budget, short
            if tiering is not None and tiering.abandon():
                continue
            short = True
            if self.manager.num_draining_blocks:
                # What a victim leaves is on its way out: who comes last waits for it.
                last = loads or rows
                while last and not self._fits([*rows, *loads]):
                    drop_last(last)
                    last = loads or rows
                return rows, loads, 0, short
            if len(roster.running) > 1:
                self._preempt([*rows, *loads], now)
            else:
                self._deltas += roster.cut_short(roster.running[0])

    def _fits(self, rows: list[Row]) -> bool:
        # No row takes more than its full blocks, the ends of the first and last, and a copy.
        manager, size = self.manager, self.manager.block_size
        enough = sum(row.count // size + 3 for row in rows)
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
        self._send_back(victim, len(rows), demand)

    def _send_back(self, victim: Victim, rows: int, demand: int) -> None:
        """Preempts a request. rows: those that need its blocks, `demand` in all."""
        manager, (request, recovery) = self.manager, victim
        available = manager.num_free_blocks + manager.num_cached_blocks
        computed = request.num_computed
        self._roster.preempt(request, recovery.blocks if recovery.kind == SWAP else 0)
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

    def _prefill_limit(self, request: Request, total: int, now: float) -> int:
        """Most tokens that the request may prefill in a step of `total`."""
        roster = self._roster
        policy = roster.policy
        if not policy.aims_at_deadlines:
            return prefill_limit(request, total, roster.awaiting_first_token)
        # In order, not in equal shares: these would make all first tokens late.
        first = roster.next(now) or request
        ahead = len(first.prompt) if policy.key(first) < policy.key(request) else 0
        return max(1, total - ahead)

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
        seats = 0  # set aside
        for held in roster.held_back():
            most = roster.tenants[held.tenant].max_running
            self.log.wait(held.id, "quota", tenant=held.tenant, max_running=most)
        try:
            while budget > 0 and (request := roster.next(now)) is not None:
                if self.num_samples + seats + len(request.live) > self.config.seats:
                    if self._make_room(request, rows, started, num_seats, self.config.seats):
                        budget, leaders = _unused(rows, whole), Leaders(self.manager, rows)
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
                share = self._prefill_limit(request, total, now)
                limit = min(budget, share)
                short = self._admission.shortage(
                    demand, passed, roster.running, [*rows, *loads], limit
                )
                if short is not None:
                    if self._make_room(request, rows, started, num_slots, slots, short):
                        budget, leaders = _unused(rows, whole), Leaders(self.manager, rows)
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
                branch = self._start(request, demand.blocks, now)
                if branch.below and branch.below[0][0] <= branch.computed:
                    self._load(branch, rows, loads)
                    continue
                row = Row(branch, branch.computed, branch.pending)
                row.cut(budget, share)
                budget -= row.count
                rows.append(row)
                leaders.add(row)
        finally:
            for demand in passed:
                demand.request.num_passings += 1
                waiting.push(demand.request)
        return budget

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
        yielding = [other for other in yielding if other not in started]
        if not yielding or self.config.admission == "max_tokens":  # which never preempts
            return False
        missing = max(1, short.blocks - short.room) if short is not None else 1
        block_bytes = None if self.tiering is None else self.tiering.block_bytes
        victim = least_loss(roster, yielding, missing, self.cost, block_bytes, self.config.recovery)
        self._send_back(victim, 1, short.blocks if short is not None else 0)
        rows[:] = [row for row in rows if row.branch.open]
        return True

    def _log_wait(self, request: Request, reason: str, **numbers: object) -> None:
        """The request was first in line and is not admitted."""
        if not self.log.still_waits(request.id, reason):
            self.log.wait(request.id, reason, **numbers, **self._pool())

    def _pool(self) -> dict[str, int]:
        """Numbers of decisions about admission."""
        return {
            "free": self.manager.num_free_blocks,
            "cached": self.manager.num_cached_blocks,
            "running": len(self._roster.running),
            "taken": self.num_samples,
            "waiting": len(self._roster.waiting),
        }

    def _start(self, request: Request, demand: int, now: float) -> Branch:
        """Opens the request's common part."""
        pool, again = self._pool(), request.admitted
        common = request.common_tokens()
        lookup = request.lookup_tokens(common)
        seq = self.manager.open(lookup, request.namespace, request.public)
        branch = self._roster.start(request, seq, now)
        if self.tiering is not None:
            self.tiering.find(branch, lookup)
        self.log.note(
            "admit",
            request.id,
            again=again,
            tokens=len(common),
            cached_tokens=branch.computed,
            below_tokens=sum(stop - start for start, stop in branch.below),
            demand=demand,
            **pool,
        )
        return branch

    def _in_flight(self) -> Batch:
        if self._flight is None:
            raise PagedKVError("no step is in flight: plan one first")
        return self._flight


def _unused(rows: Sequence[Row], budget: int) -> int:
    return budget - sum(row.count for row in rows)
