"""What the engine decides, seen from inside and judged by rules stated here once more, plainly.

Nothing here calls what it judges: rows, victims, admissions and cuts are worked out anew from the
messages that were sent and the tokens that were drawn.
"""

from __future__ import annotations

import math

import numpy as np
from engine_faults import FaultyExecutor
from engine_oracle import Sent
from harness import Run

from pagedkv.scheduling.messages import Delta
from pagedkv.scheduling.request import Branch, Request
from pagedkv.scheduling.step import Step

Key = tuple[str, int]  # request, sample


class Watch:
    """Stands between a Run and its scheduler.

    public: tokens that all tenants may share. sent: by request id. due: ends that the next step has
    to report, by (request, sample).
    planning: whether a step is being taken; what a test does between two is not judged.
    """

    def __init__(
        self,
        run: Run,
        executor: FaultyExecutor,
        caching: bool,
        public: tuple[int, ...],
        sent: dict[str, Sent],
        due: dict[Key, str],
    ) -> None:
        self.run, self.executor, self.caching = run, executor, caching
        self.public, self.sent, self.due = public, sent, due
        self.planning = False
        self.preempted = 0
        config = run.scheduler.config
        # First come, first served, whoever it is: of other policies less is said here.
        self.plain = config.policy == "fcfs" and not config.tenants
        manager = run.manager
        # Whose K/V is in a slot: an index of `tenants`, -1 for nobody's.
        self.wrote = np.full((manager.num_blocks + 1) * manager.block_size, -1)
        self.tenants: list[tuple[str | None, str | None]] = []
        scheduler = run.scheduler
        submit, cut, preempt = (
            executor.submit,
            scheduler._roster.cut_short,
            scheduler._roster.preempt,
        )
        admit, start = scheduler._planner._admit, scheduler._planner._start

        def noting_submit(step: Step):
            self.note_step(step)
            return submit(step)

        def noting_cut(request: Request) -> list[Delta]:
            self.note_cut(request)
            return cut(request)

        def noting_preempt(request: Request, *how) -> None:
            self.note_preempt(request)
            preempt(request, *how)

        def noting_admit(rows, loads, budget: int, now: float) -> int:
            before = len(scheduler._roster.running)
            left = admit(rows, loads, budget, now)
            self.note_admitted(len(scheduler._roster.running) > before, left)
            return left

        def noting_start(request: Request, *rest) -> Branch:
            self.note_start(request)
            return start(request, *rest)

        executor.submit = noting_submit
        scheduler._roster.cut_short, scheduler._roster.preempt = noting_cut, noting_preempt
        scheduler._planner._admit, scheduler._planner._start = noting_admit, noting_start

    # ---- who is computed

    def note_step(self, step: Step) -> None:
        """Who is computed, on whose K/V, and who is to end if the step goes wrong."""
        manager, scheduler = self.run.manager, self.run.scheduler
        branches = {b.seq: b for r in scheduler._roster.running for b in r.branches}
        rows = [branches[seq] for seq in step.seqs.tolist()]
        assert step.query_lens.min() >= 1
        assert step.num_tokens == step.query_lens.sum() <= scheduler.config.max_num_batched_tokens
        assert len({row.seq for row in rows}) == len(rows)
        size, wrote = manager.block_size, self.wrote
        for source, destination, filled in step.copies.tolist():
            wrote[destination * size : destination * size + filled] = wrote[
                source * size : source * size + filled
            ]
        ends = np.cumsum(step.query_lens)
        for i, branch in enumerate(rows):
            sent = self.sent[branch.request.id]
            tenant = sent.add.tenant, sent.add.cache_salt
            if tenant not in self.tenants:
                self.tenants.append(tenant)
            wrote[step.slots[ends[i] - step.query_lens[i] : ends[i]]] = self.tenants.index(tenant)
            visible = manager.tables([branch.seq]).slots()[: step.context_lens[i]]
            common = len(self.public)
            if sent.add.prompt[:common] != self.public:
                common = 0
            own = visible[common // size * size :]
            assert (wrote[own] == self.tenants.index(tenant)).all(), "K/V of another tenant"
            sent.computed += int(step.query_lens[i])
            sent.seqs.add(branch.seq)
        if self.executor.fault is None:
            return
        self.executor.row %= len(rows)
        failing = self.executor.failing(self.executor.fault, step)
        for i, branch in enumerate(rows):
            request = branch.request
            if failing is None or (i in failing and request.search is not None):
                outputs = request.live
            elif i in failing:
                outputs = branch.members
            else:
                continue
            self.sent[request.id].disturbed = True
            self.due |= {(request.id, o.index): "error" for o in outputs}

    # ---- who comes and who goes

    def blocks_of(self, request: Request) -> int:
        """Blocks that all known tokens of the request take when it shares them with nobody else.

        Samples have the full blocks of the prompt in common, and the prompt alone until they
        part; beams have in common what begins alike.
        """
        size, prompt = self.run.manager.block_size, request.prompt.tolist()
        texts = [(*prompt, *output.tokens) for output in request.live]
        if request.search is not None:
            ends = {text[:end] for text in texts for end in range(size, len(text), size)}
            return len(ends | set(texts))
        if len(texts) == 1 or all(len(text) == len(prompt) for text in texts):
            return -(-len(texts[0]) // size)
        shared = len(prompt) // size
        return shared + sum(-(-len(text) // size) - shared for text in texts)

    def note_admitted(self, some: bool, budget: int) -> None:
        """Without a cache, where nobody has anything of another: those are let in who fit.

        some: whether anyone was let in. budget: the tokens that are left.
        """
        scheduler, room = self.run.scheduler, self.run.manager.num_blocks
        config, running = scheduler.config, scheduler._roster.running
        if not self.plain or self.caching or config.admission == "first_chunk":
            return
        kept = math.ceil(config.watermark * room)
        need = sum(map(self.blocks_of, running))
        assert need <= room - kept * (len(running) > 1) or not some, "let in and does not fit"
        waiting = self.waiting()
        room -= kept * (len(running) > 0)
        if budget and waiting and config.admission == "prompt":
            first = scheduler._roster.requests[waiting[0]]
            seats = scheduler.num_samples + len(first.live) <= scheduler.config.seats
            assert not seats or need + self.blocks_of(first) > room, "would fit and has to wait"

    def waiting(self) -> list[str]:
        """Those that have run before come first; of them, and of the others, the earliest."""
        running = {r.id for r in self.run.scheduler._roster.running}
        waiting = set(self.run.scheduler._roster.requests) - running
        return sorted(
            waiting, key=lambda name: (not self.sent[name].seqs, self.sent[name].add.arrival)
        )

    def note_start(self, request: Request) -> None:
        """With a cache one may be passed over, whose beginning this very step computes."""
        first = self.waiting()[0]
        assert self.caching or not self.plain or request.id == first, (
            f"{request.id} is let in before {first}"
        )

    def note_preempt(self, request: Request) -> None:
        """Whoever yields, the first to have arrived never does."""
        self.preempted += 1
        running = [self.sent[r.id].add.arrival for r in self.run.scheduler._roster.running]
        if self.planning:
            assert len(running) > 1
            assert self.run.scheduler.config.admission != "max_tokens"
            assert self.sent[request.id].add.arrival > min(running), "the oldest yields"

    def note_cut(self, request: Request) -> None:
        """Only a request that takes more than the whole pool alone is cut short."""
        assert self.blocks_of(request) > self.run.manager.num_blocks
        self.sent[request.id].cut = True
