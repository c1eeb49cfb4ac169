"""Requests that want their tokens in time through the real loop, and how many get them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pagedkv.cache import BlockManager
from pagedkv.engine.core import EngineCore
from pagedkv.errors import PagedKVError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.overload import Job, moore_hodgson
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.simulation.clock import VirtualClock
from pagedkv.simulation.executor import StepCost, TimedExecutor

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Target:
    """What a class of requests wants, in seconds; share: of all requests."""

    share: float
    ttft: float
    tpot: float


@dataclass(slots=True)
class TargetedRequest:
    """A request, what it wants, and what came of it. Seconds on the virtual clock.

    output_tokens: what it would generate; the scheduler is not told.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    target: Target
    tenant: str | None = None
    first_token: float = math.inf
    end: float = math.inf
    tokens: int = 0
    reason: str = ""

    @property
    def finished(self) -> bool:
        """Whether it got all its tokens, in time or not."""
        return self.tokens == self.output_tokens

    @property
    def on_time(self) -> bool:
        """First token by d(1) = arrival + ttft and last token by d(n) = d(1) + (n - 1) * tpot."""
        first = self.arrival + self.target.ttft
        last = first + (self.output_tokens - 1) * self.target.tpot
        return self.finished and self.first_token <= first and self.end <= last

    @property
    def on_pace(self) -> bool:
        """First token by d(1) and mean time between tokens within tpot: no credit for early ones.

        The definition of DistServe (Zhong et al., OSDI 2024).
        """
        if not self.finished or self.first_token > self.arrival + self.target.ttft:
            return False
        return self.end - self.first_token <= (self.tokens - 1) * self.target.tpot

    @property
    def wait(self) -> float:
        """Until its first token or, without one, its end."""
        return min(self.first_token, self.end) - self.arrival


@dataclass(frozen=True, slots=True)
class TargetedRun:
    """num_given_up: see `Overload`."""

    requests: Sequence[TargetedRequest]
    seconds: float
    num_steps: int
    num_preemptions: int
    num_given_up: int
    cost_model: str

    @property
    def attainment(self) -> float:
        """Share of the requests that were on time; rejected ones were not."""
        return sum(r.on_time for r in self.requests) / len(self.requests)


def choose_targets(n: int, mix: Sequence[Target]) -> list[Target]:
    """A target for each of n requests, in shares as the mix says, evenly spread over them.

    The additive recurrence of the golden ratio: no generator, no seed.
    """
    points = np.arange(n) * 0.6180339887498949 % 1.0
    bounds = np.cumsum([target.share for target in mix])[:-1]
    return [mix[i] for i in np.searchsorted(bounds, points, side="right").tolist()]


def serve_targets(
    requests: Sequence[TargetedRequest],
    config: SchedulerConfig,
    num_blocks: int,
    cost: StepCost,
    *,
    max_tokens: int = 1024,
    knows_lengths: bool = False,
    left_out: frozenset[int] = frozenset(),
) -> TargetedRun:
    """Runs all requests, sorted by arrival, to their ends, and fills in what came of them.

    Each says `max_tokens`, and ends by a stop token after its `output_tokens`, which nobody knows
    before; knows_lengths: the overload control does. Each is worth nothing when max_tokens tokens
    should have been there. left_out: indices of requests that are refused at the door.
    """
    manager = BlockManager(
        num_blocks,
        BLOCK_SIZE,
        prefix_caching=False,  # the prompts have nothing in common
        max_seqs=config.seats,
        max_blocks_per_seq=min(num_blocks, -(-config.max_model_len // BLOCK_SIZE)),
    )
    clock = VirtualClock()
    scheduler = Scheduler(manager, config)
    executor = TimedExecutor(clock, cost)
    if knows_lengths:
        scheduler.overload.expected_output = _truth(requests)
    core = EngineCore(scheduler, executor)
    coming, num_steps = 0, 0
    while coming < len(requests) or core.has_unfinished():
        if not core.has_unfinished():
            clock.now = max(clock.now, requests[coming].arrival)
        while coming < len(requests) and requests[coming].arrival <= clock.now:
            if coming not in left_out:
                core.send(_add(coming, requests[coming], max_tokens, executor))
            coming += 1
        deltas, stats = core.step(clock.now)
        num_steps += stats is not None
        if stats is None and not deltas and core.has_unfinished():
            raise PagedKVError(f"at {clock.now:.6g} s no step is planned: a standstill")
        for delta in deltas:
            request = requests[int(delta.request_id)]
            if delta.token_ids:
                request.first_token = min(request.first_token, clock.now)
                request.tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                request.end, request.reason = clock.now, delta.finish_reason
    return TargetedRun(
        requests,
        clock.now,
        num_steps,
        scheduler.stats.num_preemptions,
        scheduler.overload.num_given_up,
        str(scheduler.cost),
    )


def left_out_in_hindsight(
    requests: Sequence[TargetedRequest], work: Sequence[float]
) -> frozenset[int]:
    """Whom Moore-Hodgson drops if it knows everything that will come, and the work of each.

    work: seconds of the server that a request takes alone, in order of `requests`. Jobs are due
    when their first tokens are; that they cannot begin before they arrive is ignored.
    """
    dues = [r.arrival + r.target.ttft for r in requests]
    order = np.argsort(dues, kind="stable").tolist()
    kept = moore_hodgson([Job(work[i], dues[i]) for i in order])
    return frozenset(i for i, keep in zip(order, kept, strict=True) if not keep)


def _truth(requests: Sequence[TargetedRequest]) -> Callable[[Request], float]:
    return lambda request: requests[int(request.id)].output_tokens


def _add(i: int, request: TargetedRequest, max_tokens: int, executor: TimedExecutor) -> Add:
    last = executor.token(i, request.prompt_tokens + request.output_tokens - 1)
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(last,), ignore_eos=True)
    target = request.target
    return Add(
        str(i),
        (i % executor.vocab_size,) + (0,) * (request.prompt_tokens - 1),
        params,
        request.arrival,
        seed=i,
        tenant=request.tenant,
        ttft_slo=target.ttft,
        tpot_slo=target.tpot,
        deadline=request.arrival + target.ttft + max_tokens * target.tpot,
    )
