"""What a request may say about time, and what happens when its deadline passes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from harness import VOCAB, Run, solo

from pagedkv.errors import RequestError
from pagedkv.scheduling.cost import StepFeatures
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import BeamSearchParams, SamplingParams
from pagedkv.scheduling.policies import POLICIES

ADD = Add("a", (1, 2), SamplingParams(max_tokens=2), 0.0, 0)


@pytest.mark.parametrize("field", ["ttft_slo", "tpot_slo"])
@pytest.mark.parametrize("value", [0, -1.0, 0.0, math.nan, math.inf, True, "1", 10**400])
def test_an_slo_is_a_finite_number_above_zero(field, value):
    scheduler = Run().scheduler
    with pytest.raises(RequestError, match=f"{field}="):
        scheduler.validate(replace(ADD, **{field: value}))
    scheduler.validate(replace(ADD, **{field: 0.5}))
    scheduler.validate(replace(ADD, **{field: 2}))


@pytest.mark.parametrize("value", [math.nan, -math.inf, False, "soon", 10**400])
def test_a_deadline_is_a_finite_time(value):
    scheduler = Run().scheduler
    with pytest.raises(RequestError, match="deadline="):
        scheduler.validate(replace(ADD, deadline=value))
    scheduler.validate(replace(ADD, deadline=-3.0))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "times",
    [
        {"tpot_slo": 10**308, "ttft_slo": 5},
        {"arrival": 10**30, "ttft_slo": 5},
        {"arrival": 10**308, "ttft_slo": 10**308},
        {"arrival": -(10**308), "deadline": 10**308},
    ],
)
def test_times_that_are_huge_ints_end_no_step(policy, times):
    """Once their sums and products were too large for a float, or for an array of them."""
    run = Run(num_blocks=8, policy=policy)
    for tokens in range(1, 20):  # the cost model is fitted then
        run.scheduler.cost.observe(StepFeatures(tokens, 0, 0.0), 1e-3 * tokens)
    for name in "ab":
        run.core.send(replace(ADD, request_id=name, params=SamplingParams(max_tokens=12), **times))
    run.finish()
    assert run.reason("a") == run.reason("b") == "length"


def test_a_request_is_finished_at_its_deadline_and_ended_after_it():
    run = Run()
    run.add("a", [1, 2, 3], max_tokens=9, deadline=5.0)
    run.add("b", [1, 2, 3], max_tokens=9, deadline=4.0)
    run.step()
    run.now = 4.0
    run.step()  # still in time
    assert not run.ends
    run.now = 4.5
    run.step()
    assert run.reason("b") == "deadline"
    assert "3 s after the request came, has passed while it was running" in run.ends["b", 0].error
    run.finish()
    assert run.reason("a") == "length"
    assert run.tokens["a", 0] == solo([1, 2, 3], max_tokens=9)
    assert run.tokens["b", 0] == solo([1, 2, 3], max_tokens=9)[:2]


def test_the_blocks_of_an_expired_request_are_there_for_the_same_plan():
    run = Run(num_blocks=2, block_size=4, budget=16, prefix_caching=False)
    run.add("old", range(8), max_tokens=1, deadline=1.0)
    run.add("new", range(10, 18), max_tokens=1)
    run.now = 2.0
    run.step()
    assert run.reason("old") == "deadline" and "waiting" in run.ends["old", 0].error
    assert run.reason("new") == "length"
    run.finish()


def test_all_samples_and_all_beams_of_an_expired_request_end():
    run = Run()
    run.add("n", [1, 2, 3], n=3, max_tokens=9, deadline=1.0)
    beam = BeamSearchParams(beam_width=2, max_tokens=9)
    run.core.send(Add("b", (4, 5), beam.sampling, 0.0, 0, beam=beam, deadline=1.0))
    for _ in range(3):
        run.step()
    run.now = 1.5
    run.finish()
    assert [run.reason("n", i) for i in range(3)] == ["deadline"] * 3
    assert [run.reason("b", i) for i in range(2)] == ["deadline"] * 2


def test_deadlines_of_requests_that_have_ended_are_forgotten():
    run = Run()
    for i in range(300):
        run.add(str(i), [i % VOCAB], max_tokens=1, deadline=1e9)
        run.step()
    assert len(run.scheduler._expiry._heap) <= 70
    run.finish()
