"""Iteration-level batching over the block manager: plan a step, commit its result."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from pagedkv.cache import BlockManager, SeqId
from pagedkv.errors import ConfigError, PagedKVError, RequestError
from pagedkv.scheduling.admission import admission_demand, fits_beside, widen
from pagedkv.scheduling.batch import Batch, Row, make_batch, others_wait, select_rows
from pagedkv.scheduling.beams import start_search
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Abort, Add, Delta
from pagedkv.scheduling.namespaces import public_length
from pagedkv.scheduling.policies import fcfs
from pagedkv.scheduling.queue import WaitingQueue
from pagedkv.scheduling.report import (
    conclude_search,
    end_outputs,
    extend_search,
    take_scores,
    take_tokens,
)
from pagedkv.scheduling.request import Branch, Output, Request
from pagedkv.scheduling.siblings import Leaders
from pagedkv.scheduling.step import Result, Step, TokenLogprobs
from pagedkv.scheduling.validate import result_mismatch, validate_add


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
    """

    def __init__(self, manager: BlockManager, config: SchedulerConfig) -> None:
        if manager.max_seqs < config.seats:
            raise ConfigError(
                f"max_num_seqs={config.max_num_seqs} lets {config.seats} sequences run at once and "
                f"the block table has max_seqs={manager.max_seqs}: make them equal"
            )
        self.manager = manager
        self.config = config
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue(fcfs.waiting_key)
        self._running: list[Request] = []  # by fcfs.rank
        # `order` of who waits for a first token; not iterated.
        self._awaiting_first_token: set[int] = set()
        self._flight: Batch | None = None
        self._deltas: list[Delta] = []  # decided, and not handed out yet
        self._draining = False
        self._num_added = 0
        self._num_steps = 0
        self._num_preemptions = 0
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

    def add(self, add: Add) -> list[Delta]:
        """Queues a request. One that cannot be accepted gets its terminal deltas at once.

        RequestError: a request with this id is still here (a delta could not tell them apart).
        """
        if add.request_id in self._requests:
            raise RequestError(f"request_id {add.request_id!r} is in use: choose another")
        try:
            self.validate(add)
        except RequestError as error:
            return [
                Delta(add.request_id, i, finish_reason="error", error=str(error))
                for i in range(add.params.n)
            ]
        public = public_length(add.prompt, self.config.public_prefixes)
        request = Request(add, self._num_added, start_search(add, self.config), public)
        self._num_added += 1
        self._requests[request.id] = request
        self._awaiting_first_token.add(request.order)
        self._waiting.push(request)
        return []

    def abort(self, abort: Abort) -> list[Delta]:
        """Ends a request or one of its samples, in any state; blocks are released at once.

        Unknown ids and samples that have ended are ignored.
        """
        request = self._requests.get(abort.request_id)
        if request is None:
            return []
        whole = abort.sample is None or request.search is not None
        which = [o for o in request.live if whole or abort.sample == o.index]
        return self._end(request, which, abort.reason)

    def drain(self) -> None:
        """Accepts nothing more; what is here is finished."""
        self._draining = True

    # Steps

    def plan(self, now: float) -> Step | None:
        """The next step, its slots reserved. None: nothing to compute.

        May end requests that have outgrown the pool: see `take_deltas`.
        """
        if self._flight is not None:
            raise PagedKVError(f"step {self._flight.step.index} is in flight: commit it first")
        if self.manager.sanitizer is not None:
            self.manager.sanitizer.begin_step(self._num_steps)
        rows, budget, preempted = self._fit_running()
        if not preempted:
            budget = self._admit(rows, budget, now)
            widen(self.manager, rows, budget)
        if not rows:
            return None
        self._flight = make_batch(
            self.manager, self._num_steps, rows, self._stamp, self.config.eos_token_ids
        )
        self._num_steps += 1
        return self._flight.step

    def take_deltas(self) -> list[Delta]:
        """Deltas that `plan` has decided since the last call, or `fail` before it raised."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def commit(self, result: Result, now: float) -> list[Delta]:
        """Takes what the step in flight has produced. A Result that does not fit is a failure."""
        flight = self._in_flight()
        mismatch = result_mismatch(flight.step, result, self.config.vocab_size)
        if mismatch:
            return self.fail(mismatch, now)
        self._flight = None
        self._stamp = flight.stamp
        deltas = self._end_failed_rows(flight, result)
        rows = [row for row in flight.rows if row.branch.open]
        self.manager.commit(
            [row.branch.seq for row in rows],
            [row.branch.tokens(row.start, row.start + row.count) for row in rows],
        )
        for row in rows:
            row.branch.computed += row.count
        for row, scores in zip(flight.scored, result.prompt_logprobs, strict=True):
            deltas += take_scores(row.branch.request, row.start, scores)
        deltas += self._take_draws(flight, result)
        for row in rows:
            self._settle(row.branch)
        return deltas

    def fail(self, message: str, now: float) -> list[Delta]:
        """The step in flight went wrong as a whole: its requests end, the others go on.

        Nothing of the step is committed or published. InvariantError: the pool is damaged; the
        deltas are left to `take_deltas` then.
        """
        flight = self._in_flight()
        self._flight = None
        self.manager.cancel([row.branch.seq for row in flight.rows if row.branch.open])
        for row in flight.rows:
            request = row.branch.request
            self._deltas += self._end(request, request.live, "error", message)
        self.manager.check()
        return self.take_deltas()

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(len(self._running), len(self._waiting), self._num_preemptions)

    @property
    def num_samples(self) -> int:
        """Live samples of the running requests: seats taken."""
        return sum(len(request.live) for request in self._running)

    @property
    def sequences(self) -> list[SeqId]:
        """Ids of the open sequences, by request in order of arrival."""
        return [branch.seq for request in self._running for branch in request.branches]

    @property
    def sharers(self) -> dict[SeqId, int]:
        """For each open sequence the number of live samples that have it in common."""
        branches = [branch for request in self._running for branch in request.branches]
        return {branch.seq: len(branch.members) for branch in branches}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    # Planning

    def _fit_running(self) -> tuple[list[Row], int, bool]:
        """Rows of the running requests, victims chosen so that they fit in the pool.

        Returns (rows, tokens left of the budget, whether anyone was preempted).
        """
        preempted = False
        while True:
            rows, budget = select_rows(
                self._running, self.config.max_num_batched_tokens, self._awaiting_first_token
            )
            if self.manager.can_reserve([r.branch.seq for r in rows], [r.count for r in rows]):
                return rows, budget, preempted
            if len(self._running) > 1:
                self._preempt(fcfs.victim(self._running))
                preempted = True
            else:
                self._deltas += self._cut_short(self._running[0])

    def _preempt(self, request: Request) -> None:
        """Back to the waiting queue. Its blocks go; the prefix cache may still have them later."""
        self._close(list(request.branches))
        self._running.remove(request)
        self._waiting.push(request)
        self._num_preemptions += 1

    def _cut_short(self, request: Request) -> list[Delta]:
        """Ends the last sample, or all beams, of a request too large for the pool even alone."""
        last = request.live[-1]
        tokens = len(request.prompt) + len(last.tokens)
        manager = self.manager
        message = (
            f"cut short at {tokens} tokens: the request alone takes more than the pool's "
            f"{manager.num_blocks} blocks of {manager.block_size}; make the pool larger"
        )
        if request.search is None:
            return self._end(request, [last], "length", message)
        deltas = conclude_search(request, message)
        self._drop_ended(request)
        return deltas

    def _admit(self, rows: list[Row], budget: int, now: float) -> int:
        """Starts waiting requests, in order, as long as each fits whole; adds their rows.

        Returns what is left of the budget.

        One whose beginning a row of this step computes is passed over: it keeps its place, and its
        seats and blocks are set aside from those who are behind it.
        """
        leaders = Leaders(self.manager, rows)
        passed: list[Request] = []
        seats = blocks = 0  # set aside
        try:
            while self._waiting and budget > 0:
                request = self._waiting.peek()
                if self.num_samples + seats + len(request.live) > self.config.seats:
                    break
                if request.total_blocks(self.manager.block_size) > self.manager.num_blocks:
                    self._deltas += self._cut_short(request)
                    continue
                waits, demand = admission_demand(self.manager, request, leaders)
                if not fits_beside(self.manager, self._running, demand + blocks):
                    break
                if waits:
                    passed.append(request)
                    self._waiting.remove(request)
                    seats, blocks = seats + len(request.live), blocks + demand
                else:
                    budget -= self._start(request, rows, budget, now)
                    leaders.add(rows[-1])
        finally:
            for request in passed:
                request.num_passings += 1
                self._waiting.push(request)
        return budget

    def _start(self, request: Request, rows: list[Row], budget: int, now: float) -> int:
        """Opens the request's common part and plans its first chunk; returns the chunk's size."""
        manager = self.manager
        common = request.common_tokens()
        lookup = request.lookup_tokens(common)
        seq = manager.open(lookup, request.namespace, request.public)
        cached = manager.length(seq)
        if not request.admitted:
            request.num_cached_tokens = cached
            request.admitted_at = now
        request.admitted = True
        branch = Branch(request, seq, request.live, cached)
        request.branches = [branch]
        self._waiting.remove(request)
        bisect.insort(self._running, request, key=fcfs.rank)
        limit = fcfs.prefill_limit(
            self.config.max_num_batched_tokens, others_wait(request, self._awaiting_first_token)
        )
        count = min(len(common) - cached, budget, limit)
        rows.append(Row(branch, cached, count))
        return count

    # Results

    def _in_flight(self) -> Batch:
        if self._flight is None:
            raise PagedKVError("no step is in flight: plan one first")
        return self._flight

    def _end_failed_rows(self, flight: Batch, result: Result) -> list[Delta]:
        """Ends the samples on rows that report an error or owe a token."""
        errors = dict(result.errors)
        for i, sample in enumerate(flight.step.samples):
            if result.indptr[i] == result.indptr[i + 1]:
                errors.setdefault(sample.row, "the executor drew no token")
        deltas: list[Delta] = []
        for i in sorted(errors):
            branch = flight.rows[i].branch
            request = branch.request
            outputs = branch.members if request.search is None else request.live
            deltas += self._end(request, outputs, "error", errors[i])
        return deltas

    def _take_draws(self, flight: Batch, result: Result) -> list[Delta]:
        """What each sample of the step has brought."""
        deltas: list[Delta] = []
        beams: dict[int, list[tuple[Branch, TokenLogprobs]]] = {}  # by Request.order
        drawn = [
            (row.branch, o)
            for row, outputs in zip(flight.rows, flight.draws, strict=True)
            for o in outputs
        ]
        for i, (branch, output) in enumerate(drawn):
            request = branch.request
            if not output.live:
                continue
            if request.search is None:
                deltas.append(take_tokens(request, output, result, i, self.config, self._capacity))
            elif (scored := result.logprobs[int(result.indptr[i])]) is not None:
                beams.setdefault(request.order, []).append((branch, scored))
        for group in beams.values():
            deltas += self._extend_beams(group)
        return deltas

    def _settle(self, branch: Branch) -> None:
        """After a step: drops ended samples, and forks where the samples part."""
        request = branch.request
        if not request.started and any(output.tokens for output in branch.members):
            request.started = True
            self._awaiting_first_token.discard(request.order)
        self._drop_ended(request)
        if branch.open and len(branch.members) > 1 and branch.computed == branch.known:
            self._fork(branch, branch.parts())

    def _fork(self, branch: Branch, parts: list[list[Output]]) -> None:
        """The branch goes on with the first of the parts, a fork of it with each other one."""
        request, (own, *others) = branch.request, parts
        branch.carry(own)
        forks = self.manager.fork(branch.seq, len(others))
        request.branches += [
            Branch(request, seq, members, branch.computed)
            for seq, members in zip(forks, others, strict=True)
        ]

    def _extend_beams(self, drawn: list[tuple[Branch, TokenLogprobs]]) -> list[Delta]:
        """The beams of a request go on from what all of them have drawn, or are reported.

        Beams without a continuation among the best release their blocks before the others fork.
        """
        request = drawn[0][0].request
        heirs = extend_search(request, drawn)
        if not heirs:
            deltas = conclude_search(request)
            self._drop_ended(request)
            return deltas
        self._close([branch for branch, _ in drawn if branch not in heirs])
        for branch, outputs in heirs.items():
            self._fork(branch, [[output] for output in outputs])
        if len(request.prompt) + len(request.live[0].tokens) > self._capacity:
            return self._cut_short(request)
        return []

    # Endings

    def _end(
        self, request: Request, outputs: list[Output], reason: str, error: str | None = None
    ) -> list[Delta]:
        """Ends live samples of a request wherever it is, and releases what they alone hold."""
        deltas = end_outputs(request, outputs, reason, error)
        self._drop_ended(request)
        return deltas

    def _drop_ended(self, request: Request) -> None:
        """Takes ended samples off their branches; a request without samples leaves."""
        for branch in request.branches:
            branch.members = [output for output in branch.members if output.live]
        self._close([branch for branch in request.branches if not branch.members])
        if not request.live and self._requests.pop(request.id, None) is request:
            self._waiting.remove(request)
            self._awaiting_first_token.discard(request.order)
            if request in self._running:
                self._running.remove(request)

    def _close(self, branches: list[Branch]) -> None:
        for branch in branches:
            branch.open = False
            branch.request.branches.remove(branch)
            self.manager.close(branch.seq)
