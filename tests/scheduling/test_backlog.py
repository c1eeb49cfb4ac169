"""How long a request that comes now is expected to wait, beside how long it does."""

from __future__ import annotations

import pytest
from harness import Run

from pagedkv.cache import BlockManager
from pagedkv.engine.core import EngineCore
from pagedkv.scheduling.backlog import Load, backlog_seconds, expected_backlog
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.cost import CostModel, StepFeatures
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.simulation.clock import VirtualClock
from pagedkv.simulation.executor import LinearCost, TimedExecutor

STEP, TOKEN = 0.01, 0.001


def fitted() -> CostModel:
    cost = CostModel()
    for i in range(1, 60):
        cost.observe(StepFeatures(i, 0, 0.0), STEP + TOKEN * i)
    return cost


IDLE = Load(0, 0, 0, 0, 0, 8.0, 0.0)


def test_nothing_is_expected_before_anything_was_measured() -> None:
    run = Run(max_num_seqs=1)
    for i in range(5):
        run.add(f"{i}", range(20), max_tokens=9)
    run.step()
    assert run.status.num_waiting == 4 and run.status.backlog_seconds == 0.0
    run.finish()


def test_an_idle_engine_takes_a_step() -> None:
    assert backlog_seconds(IDLE, fitted(), 100) == pytest.approx(STEP + TOKEN, rel=0.05)


def test_prompts_ahead_take_their_work_and_their_share_of_steps() -> None:
    load = IDLE._replace(prefills=4, prefill_tokens=400, samples=4)
    expected = (STEP + TOKEN) * 5 + 400 * TOKEN
    assert backlog_seconds(load, fitted(), 100) == pytest.approx(expected, rel=0.05)


def test_who_finds_no_place_waits_until_enough_have_ended() -> None:
    load = IDLE._replace(decodes=8, samples=23, output=50.0)
    step = STEP + 8 * TOKEN
    expected = step + 16 * step * 50 / 8  # 15 that wait and the new one, 8 places
    assert backlog_seconds(load, fitted(), 100) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("field", ["prefill_tokens", "samples", "output"])
def test_more_ahead_is_never_less_time(field: str) -> None:
    load = Load(4, 100, 8, 400, 20, 8.0, 30.0)
    more = load._replace(**{field: 2 * getattr(load, field)})
    assert backlog_seconds(more, fitted(), 100) > backlog_seconds(load, fitted(), 100)


@pytest.mark.parametrize(("ahead", "blocks"), [(0, 2000), (20, 2000), (60, 2000), (60, 100)])
def test_it_is_about_as_long_as_the_wait_turns_out_to_be(ahead: int, blocks: int) -> None:
    """Within a factor of two, on an engine of 8 seats or too few blocks for them."""
    clock = VirtualClock()
    manager = BlockManager(blocks, 4, max_seqs=8, prefix_caching=False)
    config = SchedulerConfig(8, 64, 1000)
    scheduler = Scheduler(manager, config)
    core = EngineCore(scheduler, TimedExecutor(clock, LinearCost(STEP, TOKEN)))

    def add(name: str) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        core.send(Add(name, tuple(range(60)), params, clock.now, 0))

    def drive(until: str | None) -> None:
        while core.has_unfinished():
            deltas, _ = core.step(clock.now)
            if any(d.request_id == until and d.token_ids for d in deltas):
                return

    for i in range(10):
        add(f"before{i}")
    drive(None)
    for i in range(ahead):
        add(f"{i}")
        if i < 8:
            core.step(clock.now)
    if ahead:
        core.step(clock.now)
    expected = expected_backlog(scheduler.roster, config, scheduler.cost)
    add("new")
    came = clock.now
    drive("new")
    waited, own = clock.now - came, 60 * TOKEN
    drive(None)
    assert expected / 2 <= waited <= 2 * expected + own
