"""A cost model fitted on a recorded run predicts the times of another one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagedkv.cache import BlockManager
from pagedkv.engine.core import EngineCore
from pagedkv.engine.recording import Recorder
from pagedkv.errors import ConfigError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.scheduling.step import Step
from pagedkv.simulation.clock import VirtualClock
from pagedkv.simulation.executor import LinearCost, TimedExecutor
from pagedkv.simulation.fitted import FittedCost
from pagedkv.simulation.serve import Server, serve
from pagedkv.simulation.trace import Trace
from pagedkv.simulation.workload import GeometricLengths, Poisson, invent

AROUND = 0.003
SERVER = Server(200, max_num_seqs=16, max_num_batched_tokens=128, max_model_len=600)


class Machine:
    """A StepCost that the fit can match, of decodes and of prefills."""

    def seconds(self, step: Step) -> float:
        decodes = step.query_lens == 1
        context = int(step.context_lens[decodes].sum())
        return 0.02 + 0.0004 * step.num_tokens + 2e-6 * context


class Loop(TimedExecutor):
    """Takes time around each step too, which its Results do not report."""

    def submit(self, step: Step):
        self.clock.advance(AROUND)
        return super().submit(step)


def workload(seed: int, rate: float = 1.5) -> Trace:
    return invent(150, rate, Poisson(), GeometricLengths(80, 30), seed)


def record(path: Path, trace: Trace) -> None:
    """The trace through the real loop, at the machine's speed."""
    clock = VirtualClock()
    manager = BlockManager(SERVER.num_blocks, 16, max_seqs=16)
    scheduler = Scheduler(manager, SchedulerConfig(16, 128, 600))
    recorder = Recorder(path, scheduler)
    core = EngineCore(scheduler, Loop(clock, Machine()), recorder)
    assert trace.arrivals is not None
    rows = zip(trace.arrivals, trace.prompt_tokens, trace.output_tokens, strict=True)
    for i, (arrival, prompt, output) in enumerate(rows):
        while core.has_unfinished() and clock.now < arrival:
            core.step(clock.now)
        clock.now = max(clock.now, float(arrival))
        params = SamplingParams(max_tokens=int(output), ignore_eos=True)
        core.send(Add(str(i), (i + 1, *[0] * (int(prompt) - 1)), params, float(arrival), 0))
    while core.has_unfinished():
        core.step(clock.now)
    recorder.close()


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> FittedCost:
    path = tmp_path_factory.mktemp("fitted") / "run"
    record(path, workload(seed=1))
    return FittedCost.of(path)


def test_the_time_around_steps_is_found(fitted: FittedCost) -> None:
    assert fitted.around == pytest.approx(AROUND, rel=1e-6)
    assert "3 ms around a step" in str(fitted)


def test_another_workload_is_predicted(fitted: FittedCost) -> None:
    class Whole(Machine):
        def seconds(self, step: Step) -> float:
            return super().seconds(step) + AROUND

    real, predicted = (serve(workload(seed=2), SERVER, cost) for cost in (Whole(), fitted))
    assert predicted.throughput == pytest.approx(real.throughput, rel=0.01)
    for name in ("ttft", "tpot"):
        for mark, value in real.percentiles(name).items():
            assert predicted.percentiles(name)[mark] == pytest.approx(value, rel=0.02), mark


def test_a_wrong_cost_is_told_apart(fitted: FittedCost) -> None:
    """The control: the figures above depend on what was fitted."""
    other = serve(workload(seed=2), SERVER, LinearCost(0.03, 0.0004))
    real = serve(workload(seed=2), SERVER, fitted)
    assert other.percentiles("tpot")["p50"] > 1.1 * real.percentiles("tpot")["p50"]


def test_predictions_leave_the_model_as_it_is(fitted: FittedCost) -> None:
    before = fitted.cost.describe()
    serve(workload(seed=3), SERVER, fitted)
    assert fitted.cost.describe() == before


def test_too_short_a_run_is_refused(tmp_path: Path) -> None:
    trace = Trace(np.zeros(1), np.array([5]), np.array([3]), None, None, None)
    record(tmp_path / "run", trace)
    with pytest.raises(ConfigError, match="3 steps are too few or too much alike"):
        FittedCost.of(tmp_path / "run")
