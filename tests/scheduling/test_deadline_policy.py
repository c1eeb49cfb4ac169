"""Who is served first, and who yields, when requests say by when they want their tokens."""

from __future__ import annotations

import pytest
from harness import VOCAB, Run, solo
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.scheduling.cost import StepFeatures

POLICIES = ["deadline", "fair+deadline"]


def order_of_ends(run: Run) -> list[str]:
    return [name for name, _ in run.ends]


def test_the_first_token_that_is_due_first_is_drawn_first():
    run = Run(max_num_seqs=1, policy="deadline")
    run.add("late", [1], max_tokens=1, ttft_slo=9.0)
    run.add("soon", [2], max_tokens=1, ttft_slo=1.0)
    run.add("between", [3], max_tokens=1, ttft_slo=5.0)
    run.finish()
    assert order_of_ends(run) == ["soon", "between", "late"]


def test_best_effort_waits_for_its_age_and_no_longer():
    run = Run(max_num_seqs=1, policy="deadline", ageing=10.0)
    run.add("old", [1], max_tokens=1)  # arrives at 0: as if it were due at 10
    run.add("due at 9", [2], max_tokens=1, ttft_slo=8.0)
    run.add("due at 11", [3], max_tokens=1, ttft_slo=9.0)
    run.finish()
    assert order_of_ends(run) == ["due at 9", "old", "due at 11"]


def test_a_prefill_makes_room_for_one_that_is_due_earlier():
    run = Run(num_blocks=100, budget=8, policy="deadline")
    run.add("long", range(40), max_tokens=1, ttft_slo=50.0)
    run.step()
    run.add("soon", range(40, 45), max_tokens=1, ttft_slo=1.0)
    run.step()
    assert run.steps[-1].query_lens.tolist() == [3, 5]
    run.finish()
    assert order_of_ends(run) == ["soon", "long"]


def test_prefills_are_served_in_order_and_not_in_equal_shares():
    run = Run(num_blocks=100, budget=8, policy="deadline")
    run.add("a", range(16), max_tokens=1, ttft_slo=5.0)
    run.add("b", range(20, 36), max_tokens=1, ttft_slo=50.0)
    run.finish()
    assert [step.query_lens.tolist() for step in run.steps] == [[8], [8], [8], [8]]
    assert order_of_ends(run) == ["a", "b"]


def test_who_has_the_most_slack_yields():
    run = Run(num_blocks=6, block_size=4, budget=16, policy="deadline", prefix_caching=False)
    run.add("tight", range(7), max_tokens=6, ttft_slo=1.0, tpot_slo=0.1)
    run.add("loose", range(7), max_tokens=6, ttft_slo=1.0, tpot_slo=9.0)
    run.add("middle", range(7), max_tokens=6, ttft_slo=1.0, tpot_slo=1.0)
    run.step()
    run.step()
    run.step()
    waiting = [r.id for r in run.scheduler._roster.waiting.requests()]
    assert waiting == ["loose"]
    run.finish()


def test_best_effort_yields_before_all_who_want_something():
    run = Run(num_blocks=4, block_size=4, budget=16, policy="deadline", prefix_caching=False)
    run.add("best effort", range(7), max_tokens=6)
    run.add("wants", range(7), max_tokens=6, ttft_slo=99.0, tpot_slo=99.0)
    run.step()
    run.step()
    run.step()
    # The first in order never yields: give the one that wants nothing the later place.
    waiting = [r.id for r in run.scheduler._roster.waiting.requests()]
    assert waiting in (["best effort"], ["wants"])
    run.finish()


def test_a_request_does_not_wait_for_a_sibling_when_its_first_token_would_be_late():
    def cached(ttft_slo: float) -> int:
        run = Run(num_blocks=100, budget=64, policy="deadline")
        run.add("first", range(20), max_tokens=1, ttft_slo=0.5)
        run.add("second", range(20), max_tokens=1, ttft_slo=ttft_slo)
        run.now = 2.0
        run.finish()
        return run.cached("second")

    assert cached(ttft_slo=5.0) == 19
    assert cached(ttft_slo=0.9) == 0


requests = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
        "seed": st.integers(0, 3),
        "n": st.sampled_from((1, 1, 1, 2)),
        "max_tokens": st.integers(1, 8),
        "ttft_slo": st.sampled_from((None, 0.1, 1.0, 5.0)),
        "tpot_slo": st.sampled_from((None, 0.05, 1.0)),
        "deadline": st.sampled_from((None, None, 1.0, 4.0, 10.0)),
        "tenant": st.sampled_from((None, "a", "b")),
        "steps": st.integers(0, 2),
        "abort": st.booleans(),
        "preempt": st.booleans(),
    }
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None)
@given(
    todo=st.lists(requests, min_size=1, max_size=10),
    blocks=st.integers(6, 30),
    overload=st.sampled_from(("best_effort", "reject")),
    step_seconds=st.sampled_from((0.01, 0.2, 1.0)),
)
def test_everyone_ends_in_time_or_with_a_reason_and_nothing_leaks(
    policy, todo, blocks, overload, step_seconds
):
    """Tokens are those of the request alone; after its deadline nobody is computed."""
    run = Run(num_blocks=blocks, block_size=4, budget=8, policy=policy, overload=overload)
    for i in range(40):  # the toy executor takes no time of its own
        tokens = 1 + i % 8
        run.scheduler.cost.observe(StepFeatures(tokens, 0, 0.0), step_seconds * tokens / 8)
    waiting = [(str(i), dict(one)) for i, one in enumerate(todo)]
    deadlines = {name: one["deadline"] for name, one in waiting}
    slos = {name: one["ttft_slo"] for name, one in waiting}
    params = {}
    while waiting or run.core.has_unfinished():
        if waiting:
            name, one = waiting.pop(0)
            steps, abort, preempt = one.pop("steps"), one.pop("abort"), one.pop("preempt")
            params[name] = one["prompt"], one["seed"], one["max_tokens"]
            run.add(name, one.pop("prompt"), **one)
        else:
            steps, abort, preempt = 1, False, False
        for _ in range(steps):
            run.step()
            for name, request in run.scheduler._roster.requests.items():
                assert deadlines[name] is None or run.now <= deadlines[name], "outlived"
                assert request.live
            run.now += step_seconds
        first = next(iter(run.scheduler._roster.requests), None)
        if preempt and first is not None:
            run.preempt(first)
        if abort and first is not None:
            run.abort(first)
        assert run.now < 1e4
    run.check_idle()
    for (name, sample), delta in run.ends.items():
        prompt, seed, count = params[name]
        alone = solo(prompt, seed + sample, max_tokens=count)
        tokens = run.tokens[name, sample]
        assert tokens == alone[: len(tokens)]
        assert delta.finish_reason in ("length", "deadline", "abort")
        if delta.finish_reason == "deadline":
            assert deadlines[name] is not None or (overload == "reject" and slos[name] is not None)
            assert delta.error
        if delta.finish_reason == "length" and delta.error is None:
            assert len(tokens) == count
