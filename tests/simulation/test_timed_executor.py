"""The same scheduler and cache under a virtual clock."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from pagedkv.cache import BlockManager
from pagedkv.errors import ConfigError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Add, Delta
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.scheduling.step import Step
from pagedkv.simulation.clock import VirtualClock
from pagedkv.simulation.executor import LinearCost, TimedExecutor, step_of


def simulate(cost: LinearCost) -> tuple[list[Step], list[tuple[float, Delta]], VirtualClock]:
    """Twenty requests, two seconds apart, through a pool that is too small for all."""
    clock = VirtualClock()
    manager = BlockManager(12, 4, max_seqs=8)
    scheduler = Scheduler(manager, SchedulerConfig(8, 16, 64))
    executor = TimedExecutor(clock, cost)
    params = SamplingParams(max_tokens=9, logprobs=0, prompt_logprobs=0)
    todo = [Add(str(i), tuple(range(i, i + 3 + i % 9)), params, 2.0 * i, i) for i in range(20)]
    steps, deltas = [], []
    while todo or len(scheduler):
        while todo and todo[0].arrival <= clock.now:
            scheduler.add(todo.pop(0), 0.0)
        step = scheduler.plan(clock.now)
        if step is None:
            clock.now = todo[0].arrival
            continue
        steps.append(step)
        result = executor.collect(executor.submit(step))
        deltas += [(clock.now, delta) for delta in scheduler.commit(result, clock.now)]
        manager.check()
    assert manager.num_held_blocks == 0
    assert scheduler.stats.num_preemptions > 0
    return steps, deltas, clock


def test_the_simulation_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import pagedkv.simulation.executor"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_equal_inputs_give_equal_decisions_and_times():
    runs = [simulate(LinearCost(0.5, 0.05, 0.001)) for _ in range(2)]
    for (steps, deltas, clock), (steps2, deltas2, clock2) in [runs]:
        assert clock.now == clock2.now
        assert [(t, d.request_id, d.token_ids) for t, d in deltas] == [
            (t, d.request_id, d.token_ids) for t, d in deltas2
        ]
        for a, b in zip(steps, steps2, strict=True):
            for name in ("seqs", "slots", "copies", "tokens", "changed_rows", "changed_tables"):
                assert np.array_equal(getattr(a, name), getattr(b, name)), name


def test_time_is_the_sum_of_the_costs():
    cost = LinearCost(0.5, 0.25, 0.125)
    clock = VirtualClock(10.0)
    manager = BlockManager(8, 4, max_seqs=8)
    scheduler = Scheduler(manager, SchedulerConfig(8, 16, 64))
    executor = TimedExecutor(clock, cost)
    scheduler.add(Add("a", (1, 2, 3), SamplingParams(max_tokens=2), 0.0, 0), 0.0)
    durations = []
    while (step := scheduler.plan(clock.now)) is not None:
        result = executor.collect(executor.submit(step))
        durations.append(result.duration)
        scheduler.commit(result, clock.now)
    # 3 tokens that see 3, then 1 token that sees 4.
    assert durations == [0.5 + 0.75 + 0.375, 0.5 + 0.25 + 0.5]
    assert clock.now == 10.0 + sum(durations)


def test_the_clock_does_not_go_back():
    clock = VirtualClock()
    with pytest.raises(ValueError, match="-1"):
        clock.advance(-1.0)
    assert clock.now == 0.0


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ((-1e-3, 1.0), "base=-0.001"),
        ((1.0, float("nan")), "per_token=nan"),
        ((1.0, 1.0, float("inf")), "per_context=inf"),
        ((0.0, 0.0, 1.0), "a step takes time"),
    ],
)
def test_a_cost_that_cannot_be_is_refused(numbers: tuple[float, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        LinearCost(*numbers)


def test_a_step_for_a_cost():
    step = step_of(3, 100, 50)
    assert step.num_tokens == 53
    assert step.query_lens.tolist() == [1, 1, 1, 50]
    assert step.context_lens.tolist() == [100, 100, 100, 50]
