"""A trace through the real loop, scheduler and block manager, under a virtual clock."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagedkv.cache import BlockManager
from pagedkv.engine.core import EngineCore
from pagedkv.errors import ConfigError, PagedKVError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Abort, Add, Delta, StepStats
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.scheduling.tenants import ORDINARY, Tenant
from pagedkv.scheduling.tiering import LowerTiers, TieringStats
from pagedkv.simulation.clock import VirtualClock
from pagedkv.simulation.executor import StepCost, TimedExecutor
from pagedkv.simulation.link import Link, LinkedTier
from pagedkv.simulation.trace import Int64, Trace
from pagedkv.tiers.names import Namer

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Server:
    """What is simulated: the pool and the limits of the scheduler, see SchedulerConfig.

    link: to a tier below; None for none.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    max_model_len: int = 16_384
    prefix_caching: bool = True
    policy: str = "fcfs"
    admission: str = "prompt"
    admission_quantile: float = 0.9
    watermark: float = 0.0
    link: Link | None = None
    recovery: str = "auto"
    ageing: float = 60.0
    tenants: tuple[tuple[str, Tenant], ...] = ()
    default_tenant: Tenant = ORDINARY

    @property
    def scheduling(self) -> SchedulerConfig:
        """ConfigError for settings that cannot be."""
        return SchedulerConfig(
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.max_model_len,
            policy=self.policy,
            admission=self.admission,
            admission_quantile=self.admission_quantile,
            watermark=self.watermark,
            recovery=self.recovery,
            ageing=self.ageing,
            tenants=self.tenants,
            default_tenant=self.default_tenant,
            decision_log=0,  # nobody would read it
        )

    def make_manager(self, guests: int = 0) -> BlockManager:
        """An empty pool. ConfigError for settings that cannot be.

        guests: sequences beside those that run.
        """
        config = self.scheduling
        if self.block_size < 1:
            raise ConfigError(f"block_size={self.block_size}: give at least 1")
        try:
            return BlockManager(
                self.num_blocks,
                self.block_size,
                prefix_caching=self.prefix_caching,
                max_seqs=config.seats + guests,
                max_blocks_per_seq=min(self.num_blocks, -(-self.max_model_len // self.block_size)),
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error


@dataclass(slots=True)
class Served:
    """Tokens that one tenant was served in one second."""

    prompt: int = 0  # counted when the first token is out
    output: int = 0


@dataclass(slots=True)
class RequestTimes:
    """Seconds of one request on the virtual clock."""

    arrival: float
    prompt_tokens: int
    tenant: str | None = None
    first_token: float | None = None
    end: float | None = None
    tokens: int = 0
    reason: str = ""

    @property
    def ttft(self) -> float:
        """From arrival to the first token; NaN if there was none."""
        return np.nan if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float:
        """Mean time between tokens after the first; NaN for fewer than two tokens."""
        if self.first_token is None or self.end is None or self.tokens < 2:
            return np.nan
        return (self.end - self.first_token) / (self.tokens - 1)


@dataclass(slots=True)
class SimulatedRun:
    """What came of a trace: every request, and every step."""

    requests: list[RequestTimes]
    num_blocks: int
    block_size: int
    steps: list[StepStats] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    moved: TieringStats | None = None  # to and from a tier below; None without one
    # By whole second and tenant (None: no tenants).
    served: dict[int, dict[str | None, Served]] = field(default_factory=dict)

    def note(self, deltas: Sequence[Delta], now: float) -> None:
        """Adds what came out of a step that ended at `now`."""
        second = self.served.setdefault(int(now), {}) if deltas else {}
        for delta in deltas:
            request = self.requests[int(delta.request_id)]
            if delta.token_ids:
                served = second.get(request.tenant)
                if served is None:
                    served = second[request.tenant] = Served()
                served.output += len(delta.token_ids)
                request.tokens += len(delta.token_ids)
                if request.first_token is None:
                    request.first_token = now
                    served.prompt += request.prompt_tokens
            if delta.finish_reason is not None:
                request.end, request.reason = now, delta.finish_reason
                self.cached_tokens += delta.num_cached_tokens

    @property
    def seconds(self) -> float:
        """From the first arrival to the last end."""
        ends = [r.end for r in self.requests if r.end is not None]
        return max(ends, default=0.0) - min(r.arrival for r in self.requests)

    @property
    def throughput(self) -> float:
        """Generated tokens a second."""
        return sum(r.tokens for r in self.requests) / self.seconds if self.seconds else 0.0

    @property
    def preemptions(self) -> int:
        return sum(step.num_preempted for step in self.steps)

    @property
    def mean_waste(self) -> float:
        """Unfilled slots / held slots of a step, mean over the steps."""
        held = np.array([step.blocks_peak for step in self.steps]) * self.block_size
        filled = np.array([step.slots_filled for step in self.steps])
        return float((1 - filled / held).mean()) if len(self.steps) else 0.0

    def percentiles(self, name: str) -> dict[str, float]:
        """P50, P90 and P99 of "ttft" or "tpot" in seconds, over the requests that have it."""
        return percentiles(self.requests, name)


def percentiles(requests: Sequence[RequestTimes], name: str) -> dict[str, float]:
    """P50, P90 and P99 of "ttft" or "tpot" in seconds, over the requests that have it."""
    values = np.array([getattr(r, name) for r in requests])
    values = values[~np.isnan(values)]
    if not len(values):
        return {}
    marks = np.percentile(values, [50, 90, 99]).tolist()
    return dict(zip(("p50", "p90", "p99"), marks, strict=True))


def serve(
    trace: Trace,
    server: Server,
    cost: StepCost,
    *,
    until: float = np.inf,
    observe: Callable[[Delta, float], None] = lambda delta, now: None,
) -> SimulatedRun:
    """Runs every request of the trace to its end, or all of them up to the time `until`.

    cost: seconds of a step. observe: is given every delta and the time it comes.

    Without arrivals all requests are there from the start. Prompts share exactly the prefixes that
    the trace's block ids say; a request generates exactly its output tokens, at least one. Those
    that can never run end with reason "error". ConfigError for settings that cannot work.
    """
    manager = server.make_manager()
    clock = VirtualClock()
    tier, lower = None, None
    if server.link is not None:
        tier = LinkedTier(server.link)
        lower = LowerTiers(tier.below, Namer(b"simulated"), server.link.block_bytes)
    executor = TimedExecutor(clock, cost, tier=tier)
    core = EngineCore(Scheduler(manager, server.scheduling, lower), executor)
    arrivals = trace.arrivals if trace.arrivals is not None else np.zeros(len(trace))
    run = SimulatedRun(request_times(trace, arrivals), server.num_blocks, server.block_size)
    # Each is made when it arrives: the prompts of a long trace would fill the memory.
    coming = make_requests(trace, arrivals, server.max_model_len)
    times = deque(arrivals.tolist())
    with collecting_seldom():
        while (times or core.has_unfinished()) and clock.now < until:
            if not core.has_unfinished():
                clock.now = max(clock.now, times[0])
            while times and times[0] <= clock.now:
                times.popleft()
                core.send(next(coming))
            deltas, stats = core.step(clock.now)
            run.note(deltas, clock.now)
            for delta in deltas:
                observe(delta, clock.now)
            if stats is not None:
                run.steps.append(stats)
            elif not deltas:  # nor would the same moment bring anything again
                raise PagedKVError(
                    f"at {clock.now:.6g} s {len(core.scheduler)} requests have not ended and no "
                    "step is planned for them: the scheduler has come to a standstill"
                )
    for i, request in enumerate(run.requests):
        if request.end is None:  # the time is up
            core.send(Abort(str(i)))
    core.step(clock.now)
    run.prompt_tokens = int(trace.prompt_tokens.sum())
    tiering = core.scheduler.tiering
    run.moved = None if tiering is None else tiering.stats
    return run


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """The garbage collector looks at the objects of a few steps at a time.

    There are thousands a step, none of them in a cycle, and nearly all gone with the next one.
    """
    usual = gc.get_threshold()
    gc.set_threshold(50_000, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def request_times(trace: Trace, arrivals: Float64) -> list[RequestTimes]:
    tenants = [None] * len(trace) if trace.tenants is None else trace.tenants
    rows = zip(arrivals.tolist(), trace.prompt_tokens.tolist(), tenants, strict=True)
    return [RequestTimes(*row) for row in rows]


def make_requests(trace: Trace, arrivals: Float64, max_model_len: int) -> Iterator[Add]:
    outputs = np.maximum(trace.output_tokens, 1).tolist()
    for i, (arrival, output) in enumerate(zip(arrivals.tolist(), outputs, strict=True)):
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        tenant = None if trace.tenants is None else trace.tenants[i]
        prompt = tuple(prompt_tokens(trace, i, max_model_len).tolist())
        yield Add(str(i), prompt, params, arrival, seed=i, tenant=tenant)


def prompt_tokens(trace: Trace, i: int, max_model_len: int) -> Int64:
    """Token ids: those of a block say which block it is, so prompts share what the ids share.

    Without ids the first token says which request it is, and nothing is shared. A prompt that is
    too long to run is cut, and too long still.
    """
    n = min(int(trace.prompt_tokens[i]), max_model_len)
    if trace.block_ids is None or trace.block_size is None:
        tokens = np.zeros(n, np.int64)
        tokens[0] = i + 1
        return tokens
    ids, size = trace.block_ids[i], trace.block_size
    # Ids of full blocks alone: what is left over belongs to nobody else.
    ids = np.append(ids, 2**30 + i)[: -(-n // size)]
    return ids[np.arange(min(n, len(ids) * size)) // size]
