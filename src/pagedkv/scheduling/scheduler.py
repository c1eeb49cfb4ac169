"""Iteration-level batching over the block manager: plan a step, commit its result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedkv.cache import BlockManager, SeqId
from pagedkv.errors import ConfigError, DrainingError, PagedKVError, RequestError
from pagedkv.scheduling.batch import Batch, make_batch
from pagedkv.scheduling.beams import start_search
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.cost import CostModel, StepFeatures, is_duration
from pagedkv.scheduling.counters import EngineCounters
from pagedkv.scheduling.decisions import DecisionLog
from pagedkv.scheduling.ending import bounds_of, find_ending
from pagedkv.scheduling.expiry import Expiry
from pagedkv.scheduling.messages import Abort, Add, Delta, Resume
from pagedkv.scheduling.namespaces import public_length
from pagedkv.scheduling.overload import Overload
from pagedkv.scheduling.planning import Planner
from pagedkv.scheduling.policies import make_policy
from pagedkv.scheduling.report import end_at, refused, refused_resume
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.results import take_result
from pagedkv.scheduling.resume import check_resume, on_clock_of, restore, resumable
from pagedkv.scheduling.roster import Roster
from pagedkv.scheduling.step import Result, Step
from pagedkv.scheduling.tally import Tally
from pagedkv.scheduling.tenants import TenantTable
from pagedkv.scheduling.tiering import LowerTiers, Tiering, TieringStats
from pagedkv.scheduling.usage import note_blocks
from pagedkv.scheduling.validate import check_queue, refusal_type, result_mismatch, validate_add


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
        self.tally = Tally(() if lower is None else lower.tiers)
        self.tiering = (
            None
            if lower is None
            else Tiering(manager, lower, self.cost, self.tally, config.recovery)
        )
        tenants = TenantTable(config.tenants, config.default_tenant)
        policy = make_policy(config, tenants, self.cost, manager)
        self._roster = Roster(manager, policy, self.log, tenants, self.tally, self.tiering)
        self._expiry = Expiry()
        self.overload = Overload(config, self.cost, self._roster)
        self._flight: Batch | None = None
        self._deltas: list[Delta] = []  # decided, and not handed out yet
        self._planner = Planner(manager, config, self._roster, self.cost, self.log, self._deltas)
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
            raise DrainingError("the engine is draining: send the request elsewhere")
        manager = self.manager
        blocks = min(manager.num_blocks, manager.max_blocks_per_seq)
        validate_add(add, self.config, blocks, manager.block_size)
        waiting = self._roster.waiting
        check_queue(add, self.config, waiting.num_samples, waiting.num_tokens)
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
            kind = refusal_type(error)
            self.tally.refused(kind)
            return refused(add, str(error), kind)
        request = self._take_in(add)
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

    def resume(self, resume: Resume, now: float) -> list[Delta]:
        """Takes in a request that comes with tokens; see `Resume`.

        One that cannot go on gets its terminal deltas at once, and so does a sample whose last
        token ends it by the limits of this scheduler. RequestError as `add`.
        """
        self.log.at(self._num_steps, now)
        roster = self._roster
        if resume.request_id in roster.requests:
            raise RequestError(f"request_id {resume.request_id!r} is in use: choose another")
        try:
            self._validate_resume(resume)
        except RequestError as error:
            self.log.note("refuse", resume.request_id, message=str(error))
            kind = refusal_type(error)
            self.tally.refused(kind)
            return refused_resume(resume, str(error), kind)
        resume = on_clock_of(resume, now)
        add = resume.add
        request = self._take_in(add)
        restore(request, resume, now)
        self.log.note(
            "resume",
            request.id,
            tenant=add.tenant,
            prompt=len(request.prompt),
            samples=len(request.live),
            tokens=sum(len(output.tokens) for output in request.live),
            waiting=len(roster.waiting),
            running=len(roster.running),
        )
        roster.enter(request)
        self._expiry.watch(request)
        return self._end_at_limits(request)

    # Moves to another scheduler: between two steps only (PagedKVError while one is in flight).

    def park(self, request_id: str, now: float) -> Resume | None:
        """Takes a running request out of the steps; it keeps its blocks, and nobody gets them.

        Returns what it takes to go on elsewhere. None: it does not run, or its blocks are being
        loaded: it cannot be parked now. KeyError: no such request is here.
        """
        self._no_flight()
        self.log.at(self._num_steps, now)
        request = self._roster.requests[request_id]
        if not request.branches or any(branch.loading for branch in request.branches):
            return None
        request.parked = True
        self.log.note("park", request.id, tokens=request.num_computed)
        return resumable(request, now)

    def unpark(self, request_id: str, now: float) -> None:
        """If it was parked, the request goes on here. KeyError: no such request is here."""
        self._no_flight()
        request = self._roster.requests[request_id]
        if request.parked:
            request.parked = False
            self.log.at(self._num_steps, now)
            self.log.note("unpark", request_id)

    def release(self, request_id: str, now: float) -> Resume:
        """Gives up a request that has not ended: what it takes to go on elsewhere.

        Its blocks are released, under their names. KeyError: no such request is here.
        """
        self._no_flight()
        self.log.at(self._num_steps, now)
        request = self._roster.requests[request_id]
        self._roster.release(request)
        return resumable(request, now)

    def _take_in(self, add: Add) -> Request:
        """A request of what `add` asks for."""
        public = public_length(add.prompt, self.config.public_prefixes)
        bounds = bounds_of(add, self.config, self._capacity)
        request = Request(add, self._num_added, start_search(add, self.config), public, bounds)
        self._num_added += 1
        return request

    def _validate_resume(self, resume: Resume) -> None:
        if self._draining:
            raise DrainingError("the engine is draining: send the request elsewhere")
        manager = self.manager
        blocks = min(manager.num_blocks, manager.max_blocks_per_seq)
        validate_add(resume.add, self.config, blocks, manager.block_size)
        check_resume(resume, self.config)

    def _end_at_limits(self, request: Request) -> list[Delta]:
        """Ends what may not go on here, where limits may differ from those it was drawn under."""
        if request.search is not None:
            longest = max(len(output.tokens) for output in request.live)
            if request.prompt_length + longest > self._capacity:
                return self._roster.cut_short(request)
            return []
        deltas: list[Delta] = []
        for output in request.live if request.started else ():
            end = find_ending(request, output, self.config, self._capacity)
            if end.finish_reason is not None:
                deltas.append(end_at(request, output, end))
        deltas = self._roster.seal(request, deltas)
        self._roster.drop_ended(request)
        return deltas

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
        self._no_flight()
        if self.manager.sanitizer is not None:
            self.manager.sanitizer.begin_step(self._num_steps)
        self.log.at(self._num_steps, now)
        self._deltas += self._expiry.end_expired(self._roster, now)
        if self._roster.policy.aims_at_deadlines:
            self._deltas += self.overload.review(now)
        rows, loads = self._planner.choose(now)
        if not rows and not loads and not self._transfers:
            return None
        everything = [*rows, *loads]
        seqs = np.array([row.branch.seq for row in everything], np.int64)
        counts = np.array([row.count for row in everything], np.int64)
        reservation = self.manager.reserve(seqs, counts)
        self._flight = make_batch(
            self.manager,
            self._num_steps,
            rows,
            seqs[: len(rows)],
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
        deltas = list(self._deltas)
        self._deltas.clear()
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
        if flight.rows:  # else it was for transfers alone
            self.cost.observe(StepFeatures.of(flight.step), result.duration)
        end = now + result.duration if is_duration(result.duration) else now
        return take_result(self._roster, flight, result, self.config, self._capacity, now, end)

    def fail(self, message: str, now: float) -> list[Delta]:
        """The step in flight went wrong as a whole: its requests end, the others go on.

        Nothing of the step is committed or published. InvariantError: the pool is damaged; the
        deltas are left to `take_deltas` then.
        """
        flight = self._in_flight()
        self._flight = None
        self.log.at(flight.step.index, now)
        self.log.note("fail", message=message)
        for row in flight.rows:
            note_blocks(self.manager, row.branch.request)
        self.manager.cancel([row.branch.seq for row in flight.rows if row.branch.open])
        if self.tiering is not None:
            self.tiering.forget(flight.step)
        for row in flight.rows:
            request = row.branch.request
            self._deltas += self._roster.end(request, request.live, "error", message, "engine")
        self.manager.check()
        return self.take_deltas()

    @property
    def stats(self) -> SchedulerStats:
        roster = self._roster
        return SchedulerStats(len(roster.running), len(roster.waiting), roster.num_preemptions)

    @property
    def counters(self) -> EngineCounters:
        """What has been done since the start. O(tenants)."""
        moved = TieringStats() if self.tiering is None else self.tiering.stats
        return self.tally.counters(
            steps=self._num_steps,
            blocks_evicted=self.manager.num_evicted_blocks,
            blocks_stored=moved.stored,
            blocks_loaded=moved.loaded,
            failed_stores=moved.failed_stores,
            failed_loads=moved.failed_loads,
            block_bytes=0 if self.tiering is None else self.tiering.block_bytes,
        )

    @property
    def roster(self) -> Roster:
        """Who waits and who runs, to be looked at."""
        return self._roster

    @property
    def draining(self) -> bool:
        """Whether nothing more is taken in."""
        return self._draining

    @property
    def step_in_flight(self) -> Step | None:
        """The step that was planned and has not been committed."""
        return None if self._flight is None else self._flight.step

    @property
    def num_samples(self) -> int:
        """Live samples of the running requests: seats taken."""
        return self._roster.num_samples

    @property
    def num_sequences(self) -> int:
        """Open sequences."""
        return sum([len(request.branches) for request in self._roster.running])

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

    def _no_flight(self) -> None:
        if self._flight is not None:
            raise PagedKVError(f"step {self._flight.step.index} is in flight: commit it first")

    def _in_flight(self) -> Batch:
        if self._flight is None:
            raise PagedKVError("no step is in flight: plan one first")
        return self._flight
