"""A toy engine that is checked from outside after every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache

import numpy as np

from pagedkv.cache import BlockManager
from pagedkv.engine.core import EngineCore
from pagedkv.engine.status import CoreStatus, core_status
from pagedkv.engine.toy import ToyExecutor, payload_bytes
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.counters import EngineCounters
from pagedkv.scheduling.messages import Abort, Add, Delta, StepStats
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.scheduling.step import Executor, Step, Ticket
from pagedkv.scheduling.tiering import LowerTiers
from pagedkv.tiers.interface import Tier
from pagedkv.tiers.names import Namer

VOCAB = 50


def slots_in_use(manager: BlockManager, seqs: Iterable[int], copies: np.ndarray) -> int:
    """Slots with a token in held blocks, block by block from the tables."""
    filled: dict[int, int] = {}
    for seq in seqs:
        left = int(manager.tables([seq]).lengths[0])
        for block in manager.block_table(seq).tolist():
            filled[block] = max(filled.get(block, 0), min(left, manager.block_size))
            left -= manager.block_size
    for source, _, count in copies.tolist():
        filled[source] = max(filled.get(source, 0), count)
    assert len(filled) == manager.num_held_blocks
    return sum(filled.values())


def numbers(counters: EngineCounters) -> list[int]:
    """All numbers of the counters in a fixed order; tenants are last, and only ever added."""
    flat: list[int] = []

    def collect(value: object) -> None:
        if isinstance(value, int):
            flat.append(value)
        elif isinstance(value, tuple):
            for item in value:
                collect(item)
        elif is_dataclass(value):
            for field in fields(value):
                collect(getattr(value, field.name))

    collect(counters)
    return flat


class Recorder:
    """Passes steps on and keeps them, with the blocks and slots in use while each runs."""

    def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
        self.executor, self.scheduler = executor, scheduler
        self.steps: list[Step] = []
        self.in_use: list[tuple[int, int, int]] = []
        # By request: most distinct blocks; most tokens with K/V, and those computed once more.
        self.blocks_peak: dict[str, int] = {}
        self.had: dict[str, int] = {}
        self.again: dict[str, int] = {}

    def submit(self, step: Step) -> Ticket:
        self.steps.append(step)
        self.note_requests(step)
        manager = self.scheduler.manager
        slots = slots_in_use(manager, self.scheduler.sequences, step.copies)
        unshared = sum(
            len(manager.block_table(seq)) * samples
            for seq, samples in self.scheduler.sharers.items()
        )
        self.in_use.append((manager.num_held_blocks, unshared, slots))
        return self.executor.submit(step)

    def note_requests(self, step: Step) -> None:
        """What each request has while the step runs, from its tables and the rows."""
        manager = self.scheduler.manager
        rows = dict(
            zip(
                step.seqs.tolist(),
                zip(step.query_lens.tolist(), step.context_lens.tolist(), strict=True),
                strict=True,
            )
        )
        for request in self.scheduler._roster.running:
            seqs, name = [branch.seq for branch in request.branches], request.id
            blocks = {block for seq in seqs for block in manager.block_table(seq).tolist()}
            self.blocks_peak[name] = max(self.blocks_peak.get(name, 0), len(blocks))
            for seq in seqs:
                count, end = rows.get(seq, (0, manager.length(seq)))
                had = self.had.get(name, 0)
                self.had[name] = max(had, end)
                if count:
                    more = max(0, min(end, had) - (end - count))
                    self.again[name] = self.again.get(name, 0) + more

    def collect(self, ticket: Ticket):
        return self.executor.collect(ticket)


class Run:
    """An engine over P blocks of B slots. `errors_ok`: requests may end with reason "error".

    settings: further ones of the scheduler.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        budget: int = 8,
        max_num_seqs: int = 8,
        max_model_len: int = 200,
        eos: tuple[int, ...] = (),
        prefix_caching: bool = True,
        executor: ToyExecutor | None = None,
        errors_ok: bool = False,
        sanitize: bool = False,
        public_prefixes: tuple[tuple[int, ...], ...] = (),
        tier: Tier | None = None,
        **settings,
    ) -> None:
        self.manager = BlockManager(
            num_blocks,
            block_size,
            prefix_caching=prefix_caching,
            max_seqs=max_num_seqs,
            sanitize=sanitize,
        )
        config = SchedulerConfig(
            max_num_seqs, budget, max_model_len, eos, VOCAB, public_prefixes, **settings
        )
        self.tier = tier
        lower = None
        if tier is not None:
            lower = LowerTiers(tier, Namer(b"toy"), payload_bytes(block_size))
        self.scheduler = Scheduler(self.manager, config, lower)
        self.toy = executor or ToyExecutor(num_blocks, block_size, VOCAB, tier=tier)
        self.toy.sanitizer = self.manager.sanitizer
        self.recorder = Recorder(self.toy, self.scheduler)
        self.core = EngineCore(self.scheduler, self.recorder)
        self.errors_ok = errors_ok
        self.deltas: list[Delta] = []
        self.stats: list[StepStats] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], Delta] = {}
        self.status: CoreStatus = core_status(self.core)
        self.sent = 0
        self.now = 0.0

    # Driving

    def add(
        self,
        name: str,
        prompt: Iterable[int],
        seed: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
        ttft_slo: float | None = None,
        tpot_slo: float | None = None,
        deadline: float | None = None,
        **params,
    ) -> None:
        params.setdefault("temperature", 0.0)
        wanted = SamplingParams(**params)
        self.core.send(
            Add(
                name,
                tuple(prompt),
                wanted,
                self.sent,
                seed,
                tenant=tenant,
                cache_salt=cache_salt,
                ttft_slo=ttft_slo,
                tpot_slo=tpot_slo,
                deadline=deadline,
            )
        )
        self.sent += 1

    def abort(self, name: str, sample: int | None = None, reason: str = "abort") -> None:
        self.core.send(Abort(name, sample, reason))

    def preempt(self, name: str) -> bool:
        """Forces a preemption between two steps; False if the request is not running."""
        request = self.request(name)
        if request is None or not request.branches:
            return False
        self.scheduler._roster.preempt(request)
        return True

    def request(self, name: str) -> Request | None:
        return self.scheduler._roster.requests.get(name)

    def step(self) -> list[Delta]:
        deltas, stats = self.core.step(self.now)
        if stats is not None:
            self.stats.append(stats)
            use = stats.blocks_peak, stats.blocks_unshared, stats.slots_filled
            assert use == self.recorder.in_use[-1]
        self.record(deltas)
        self.check()
        return deltas

    def finish(self, limit: int = 2000) -> Run:
        for _ in range(limit):
            if not self.core.has_unfinished():
                self.check_idle()
                return self
            self.step()
        raise AssertionError(f"not finished after {limit} steps")

    def record(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            key = delta.request_id, delta.sample
            assert key not in self.ends, f"{delta} after the end of its sample"
            self.deltas.append(delta)
            self.tokens.setdefault(key, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.ends[key] = delta
                self.check_usage(delta)
                assert self.errors_ok or delta.finish_reason != "error", delta.error

    # Checking

    def check_usage(self, delta: Delta) -> None:
        """The last delta of a request that was taken in says what the request has taken."""
        assert (delta.error_type is not None) == (delta.finish_reason in ("error", "deadline"))
        name, seen = delta.request_id, self.recorder
        if delta.usage is None:
            return
        assert delta.usage.cached_tokens == delta.num_cached_tokens
        assert delta.usage.blocks_peak == seen.blocks_peak.pop(name, 0)
        again, _ = seen.again.pop(name, 0), seen.had.pop(name, 0)
        if delta.sample == 0 and (name, 1) not in self.ends:
            assert delta.usage.recomputed_tokens == again

    def check_status(self) -> None:
        """The gauges are what can be counted one by one; nothing that counts ever falls."""
        manager, roster = self.manager, self.scheduler._roster
        before, self.status = self.status, core_status(self.core)
        now = self.status
        parts = (now.blocks_free, now.blocks_cached, now.blocks_held, now.blocks_draining)
        assert sum(parts) == now.num_blocks and min(parts) >= 0
        assert now.blocks_shared == sum(count > 1 for count in manager.pool.counts.tolist())
        if not any(branch.loading for branch in roster.branches):
            none = np.zeros((0, 3), np.int32)
            filled = slots_in_use(manager, self.scheduler.sequences, none)
            assert now.unfilled_slots == now.blocks_held * now.block_size - filled
        waiting = roster.waiting.requests()
        assert now.num_waiting == len(waiting) and now.num_running == len(roster.running)
        assert now.waiting_samples == sum(len(r.outputs) for r in waiting)
        assert now.waiting_tokens == sum(r.prompt_length for r in waiting)
        assert now.num_swapped_out == sum(r.swapped > 0 for r in waiting)
        assert sum(t.running for t in now.tenants) == now.num_running
        assert sum(t.waiting for t in now.tenants) == now.num_waiting
        assert sum(t.waiting_tokens for t in now.tenants) == now.waiting_tokens
        assert 0 <= now.backlog_seconds < float("inf") and 0 <= now.kv_cache_usage <= 1
        ended = sum(number for _, number in now.counters.requests_finished)
        ended += now.counters.requests_released
        assert now.counters.requests_added == ended + now.num_running + now.num_waiting
        for old, new in zip(numbers(before.counters), numbers(now.counters), strict=False):
            assert 0 <= old <= new

    def check(self) -> None:
        self.check_status()
        manager = self.manager
        manager.check()
        parts = manager.num_free_blocks, manager.num_cached_blocks, manager.num_held_blocks
        assert sum(parts) + manager.num_draining_blocks == manager.num_blocks
        blocks = np.arange(1, manager.num_blocks + 1, dtype=np.int32)
        self.toy.poison(blocks[manager.pool.is_free(blocks)])
        open_seqs = []
        for request in self.scheduler._roster.running:
            covered = [o.index for branch in request.branches for o in branch.members]
            assert sorted(covered) == [o.index for o in request.live]
            for branch in request.branches:
                open_seqs.append(branch.seq)
                assert branch.computed == manager.length(branch.seq)
                assert branch.settles_to_decode or not branch.decodes
                slots = manager.tables([branch.seq]).slots()[: branch.computed]
                assert self.toy.written[slots].all()
                assert self.toy.tokens[slots].tolist() == branch.tokens(0, branch.computed)
        assert len(open_seqs) == manager.num_open_sequences
        assert sum(len(r.live) for r in self.scheduler._roster.running) <= (
            self.scheduler.config.max_num_seqs
        )

    def check_idle(self) -> None:
        self.check()
        assert len(self.scheduler) == 0 and not self.scheduler.has_work
        assert self.manager.num_draining_blocks == 0
        stats = self.scheduler.stats
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert self.manager.num_held_blocks == 0
        assert self.manager.num_open_sequences == 0
        assert not self.scheduler._roster.awaiting_first_token and not self.core._ids

    def reason(self, name: str, sample: int = 0) -> str | None:
        return self.ends[name, sample].finish_reason

    def cached(self, name: str) -> int:
        return next(d for d in self.deltas if d.request_id == name).num_cached_tokens

    @property
    def steps(self) -> list[Step]:
        return self.recorder.steps


@lru_cache(maxsize=4096)
def _solo(prompt: tuple[int, ...], seed: int, params: tuple[tuple[str, object], ...]):
    run = Run(num_blocks=100, block_size=16, budget=300, prefix_caching=False)
    run.add("solo", prompt, seed, **dict(params))
    run.finish()
    return tuple(run.tokens["solo", 0])


def solo(prompt: Sequence[int], seed: int = 0, **params) -> list[int]:
    """Tokens of a request in a fresh engine with room for everything."""
    return list(_solo(tuple(prompt), seed, tuple(sorted(params.items()))))
