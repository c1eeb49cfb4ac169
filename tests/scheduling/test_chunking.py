"""How many tokens a step may have beside decodes that want their next token in time."""

from __future__ import annotations

import math

import pytest
from harness import Run

from pagedkv.scheduling.chunking import Decodes, step_budget
from pagedkv.scheduling.cost import CostModel, StepFeatures
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import SamplingParams
from pagedkv.simulation.clock import VirtualClock
from pagedkv.simulation.executor import LinearCost, TimedExecutor

LIMIT = 1000


@pytest.fixture
def cost() -> CostModel:
    """10 ms a step, 1 ms a token."""
    model = CostModel()
    for i in range(60):
        tokens = 1 + 37 * i % 200
        model.observe(StepFeatures(tokens, 0, 0.0), 0.01 + 0.001 * tokens)
    assert model.fitted
    return model


def decodes(slack: float, count: int = 10) -> Decodes:
    return Decodes(count, 0, slack, math.inf)


def test_the_step_ends_within_the_slack_and_one_more_tile_would_not(cost):
    tokens = step_budget(decodes(0.1), cost, LIMIT, 0)
    assert (tokens - 10) % 16 == 0
    assert cost.predict(tokens) <= 0.1 < cost.predict(tokens + 16)


def test_more_slack_never_means_fewer_tokens(cost):
    budgets = [step_budget(decodes(slack / 100), cost, LIMIT, 0) for slack in range(300)]
    assert budgets == sorted(budgets)
    assert budgets[0] == 10 + 32  # progress, whatever it costs
    assert budgets[-1] == LIMIT


def test_the_limit_counts_when_nothing_is_wanted_or_nothing_is_known(cost):
    assert step_budget(decodes(math.inf), cost, LIMIT, 0) == LIMIT
    assert step_budget(decodes(0.01), CostModel(), LIMIT, 0) == LIMIT
    assert step_budget(decodes(0.01, count=LIMIT), cost, LIMIT, 0) == LIMIT


def test_what_a_chunk_follows_shortens_it(cost):
    """With query-key pairs in the cost: 10 ms a step, 1 ms a token, 10 us a pair."""
    model = CostModel()
    for i in range(60):
        tokens, prior = 1 + 37 * i % 200, 29 * i % 300
        pairs = tokens * (prior + tokens / 2)
        model.observe(StepFeatures(tokens, 0, pairs), 0.01 + 0.001 * tokens + 1e-5 * pairs)
    assert step_budget(decodes(0.3), model, LIMIT, 500) < step_budget(decodes(0.3), model, LIMIT, 0)


def look(cost: CostModel, slos: list[tuple[float | None, float | None]], now: float) -> Decodes:
    """At requests that have drawn two tokens each, the first at time 0."""
    run = Run()
    for i, (ttft, tpot) in enumerate(slos):
        run.sent = 0  # all arrive at 0
        run.add(str(i), [i], max_tokens=9, ttft_slo=ttft, tpot_slo=tpot)
    run.step()
    run.step()
    seen = Decodes.of(run.scheduler._roster.running, cost, now)
    run.finish()
    return seen


def test_the_earliest_token_that_can_still_be_in_time_bounds_the_step(cost):
    slos = [(1.0, 0.5), (2.0, 0.1), (None, None)]
    # Third tokens: 1 + 2 * 0.5 and 2 + 2 * 0.1. Each has a prompt token and two drawn ones.
    assert look(cost, slos, 0.0) == (3, 9, pytest.approx(2.0), 0.1)
    assert look(cost, slos, 1.9).slack == pytest.approx(0.1)


def test_a_token_that_is_late_whatever_is_done_bounds_the_step_by_its_pace(cost):
    assert look(cost, [(1.0, 0.5), (2.0, 0.3)], 2.1).slack == pytest.approx(0.3)
    assert look(cost, [(1.0, 0.5)], 2.1).slack == pytest.approx(0.5)


def test_without_a_target_for_the_first_token_the_pace_counts_from_when_it_came(cost):
    assert look(cost, [(None, 0.5)], 0.25).slack == pytest.approx(0.75)
    assert look(cost, [(0.5, None)], 0.25).slack == math.inf


def late_tokens(policy: str) -> int:
    """Of decodes that want a token every 50 ms, beside prompts that take steps of 110 ms."""
    run = Run(num_blocks=400, budget=100, max_num_seqs=16, policy=policy)
    clock = VirtualClock()
    run.core.executor = TimedExecutor(clock, LinearCost(0.01, 0.001), vocab_size=50)
    for i in range(40):  # what steps take is known by then
        run.core.send(Add(f"warm {i}", (i,) * (1 + i), SamplingParams(max_tokens=8), 0.0, i))
    while run.core.has_unfinished():
        run.core.step(clock.now)
    start, late = clock.now, 0
    drawn = [0] * 4
    params = SamplingParams(max_tokens=60)
    for i in range(4):
        slos = {"ttft_slo": 0.2, "tpot_slo": 0.05}
        run.core.send(Add(str(i), (i, i), params, start, i, **slos))
    for i in range(12):
        add = Add(f"long {i}", (i,) * 150, SamplingParams(max_tokens=1), start + 0.3 * i, i)
        run.core.send(add)
    while run.core.has_unfinished():
        for delta in run.core.step(clock.now)[0]:
            if delta.request_id in "0123" and delta.token_ids:
                i = int(delta.request_id)
                late += clock.now > start + 0.2 + drawn[i] * 0.05 + 1e-9
                drawn[i] += 1
    assert drawn == [60] * 4
    return late


def test_no_decode_is_late_for_the_sake_of_a_prefill():
    assert late_tokens("deadline") == 0
    assert late_tokens("fcfs") > 20  # the same work makes decodes late


def test_prefills_leave_the_decodes_their_slack():
    """1 s a token; a decode that has 41 s leaves a prefill 32 of them."""
    run = Run(num_blocks=200, budget=100, policy="deadline", overload="best_effort")
    for i in range(40):
        tokens = 1 + i % 20
        run.scheduler.cost.observe(StepFeatures(tokens, 0, 0.0), 1.0 * tokens)
    run.add("decode", [1], max_tokens=9, ttft_slo=1.0, tpot_slo=40.0)
    run.step()
    run.add("prefill", list(range(40)) * 3, max_tokens=1)
    run.step()
    assert run.steps[-1].query_lens.tolist() == [1, 32]
    run.finish()
