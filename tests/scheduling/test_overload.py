"""Moore-Hodgson, and what a review does with those who cannot be served in time."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from harness import Run
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.errors import ConfigError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.cost import StepFeatures
from pagedkv.scheduling.overload import INTERVAL, Job, moore_hodgson

works = st.integers(1, 9)
jobs = st.lists(st.tuples(works, st.integers(0, 30)), max_size=9)


def in_time(chosen: list[Job]) -> bool:
    done = np.cumsum([job.work for job in chosen])
    return all(done <= [job.due for job in chosen])


@given(jobs)
def test_as_many_jobs_are_in_time_as_any_choice_allows(pairs):
    given_jobs = [Job(work, due) for work, due in sorted(pairs, key=lambda pair: pair[1])]
    kept = [job for job, keep in zip(given_jobs, moore_hodgson(given_jobs), strict=True) if keep]
    assert in_time(kept)
    best = max(
        size
        for size in range(len(given_jobs) + 1)
        if any(in_time(list(some)) for some in combinations(given_jobs, size))
    )
    assert len(kept) == best


@given(st.lists(st.tuples(works, st.integers(0, 30), st.booleans()), max_size=9))
def test_jobs_that_may_not_be_dropped_only_take_their_time(triples):
    """Those kept are in time; one more of those dropped, added to them, would not be."""
    given_jobs = [Job(*triple) for triple in sorted(triples, key=lambda triple: triple[1])]
    kept = moore_hodgson(given_jobs)
    total = 0.0
    for job, keep in zip(given_jobs, kept, strict=True):
        assert keep or job.droppable
        total += job.work * keep
        assert not (keep and job.droppable) or total <= job.due


def test_a_late_job_goes_alone_when_dropping_another_does_not_help():
    jobs = [Job(1, 0, False), Job(1, 2), Job(1, 2, False), Job(1, 2)]
    assert moore_hodgson(jobs) == [True, True, True, False]


def test_the_longest_is_dropped_and_of_equals_the_later():
    assert moore_hodgson([Job(5, 6), Job(1, 6), Job(1, 6)]) == [False, True, True]
    assert moore_hodgson([Job(2, 2), Job(2, 3)]) == [True, False]
    assert moore_hodgson([Job(3, 3), Job(2, 4)]) == [False, True]


def fitted(seconds_per_token: float = 0.1, **settings) -> Run:
    """A run whose cost model has learnt that a step takes 0.1 s a token, and nothing else."""
    run = Run(num_blocks=200, budget=10, policy="deadline", errors_ok=True, **settings)
    for i in range(40):
        run.scheduler.cost.observe(
            StepFeatures(1 + i % 10, 0, 0.0), seconds_per_token * (1 + i % 10)
        )
    assert run.scheduler.cost.fitted
    return run


def demoted(run: Run) -> list[str]:
    return [r.id for r in run.scheduler._roster.requests.values() if r.demoted]


def ends(run: Run, **until) -> None:
    """Steps that take 0.1 s a token."""
    while run.core.has_unfinished():
        before = len(run.steps)
        run.step()
        run.now += sum(step.num_tokens for step in run.steps[before:]) * 0.1 or 0.1


def test_nobody_is_given_up_as_long_as_all_can_be_served_in_time():
    run = fitted()
    for i in range(4):
        run.add(str(i), range(10), max_tokens=1, ttft_slo=8.0)
    run.step()
    assert not demoted(run)
    run.finish()


def test_the_one_with_the_most_work_stands_back_and_is_served_when_nobody_else_is_left():
    run = fitted()
    run.add("long", range(40), max_tokens=1, ttft_slo=5.0)
    for i in range(3):
        run.add(str(i), range(i, i + 10), max_tokens=1, ttft_slo=5.0)
    run.step()
    assert demoted(run) == ["long"]
    ends(run)
    assert list(run.ends)[-1] == ("long", 0) and run.reason("long") == "length"


def test_one_who_was_given_up_comes_back_when_there_is_room_to_spare():
    run = fitted()
    run.add("long", range(20), max_tokens=5, ttft_slo=6.0)
    for i in range(3):  # arrives at i + 1
        run.add(str(i), range(20 + i, 35 + i), max_tokens=1, ttft_slo=5.0 - i)
    run.step()
    assert demoted(run) == ["long"]
    for i in range(3):
        run.abort(str(i))
    run.step()
    assert demoted(run) == ["long"]  # the next review is due later
    run.now += 1.1 * INTERVAL
    run.step()
    assert run.request("long") is not None and demoted(run) == []
    run.finish()


def test_a_rejected_request_says_with_numbers_why():
    run = fitted(overload="reject")
    run.add("hopeless", range(40), max_tokens=1, ttft_slo=3.0)
    run.add("fine", range(10), max_tokens=1, ttft_slo=3.0)
    run.step()
    assert run.reason("hopeless") == "deadline"
    error = run.ends["hopeless", 0].error
    assert "within 3 s" in error and "4 s of its prompt are left" in error and "1 other" in error
    ends(run)
    assert run.reason("fine") == "length"
    run.check_idle()


def test_reviews_of_many_requests_are_further_apart():
    run = fitted()
    for i in range(2000):
        run.add(str(i), [i % 50], max_tokens=1, ttft_slo=1e6)
    run.step()
    looked: list[float] = []
    run.scheduler.overload.expected_output = lambda _: looked.append(run.now) or 1.0
    for _ in range(10):
        run.now += INTERVAL
        run.step()
    assert len(set(looked)) in (2, 3)  # not 10
    for i in range(2000):
        run.abort(str(i))
    run.finish()


def test_a_server_whose_steps_take_the_same_whatever_they_compute_is_judged_by_steps():
    run = Run(num_blocks=200, budget=10, policy="deadline")
    for i in range(40):
        run.scheduler.cost.observe(StepFeatures(1 + i % 10, i % 7, 0.0), 1.0)
    for i in range(3):
        run.add(
            str(i), range(10 * i, 10 * i + 10), max_tokens=1, ttft_slo=3.1 - i
        )  # all due at 3.1
    run.step()
    assert len(demoted(run)) == 1  # two steps before it, and its own
    run.finish()


def test_without_a_target_nobody_is_given_up():
    run = fitted(overload="reject")
    for i in range(6):
        run.add(str(i), range(i, i + 30), max_tokens=1)
    run.add("slo", range(9), max_tokens=1, ttft_slo=1.5)
    ends(run)
    assert {delta.finish_reason for delta in run.ends.values()} == {"length"}
    assert next(iter(run.ends)) == ("slo", 0)


def test_no_review_before_the_cost_model_is_fitted():
    run = Run(policy="deadline", overload="reject")
    run.add("a", range(30), max_tokens=1, ttft_slo=1e-3)
    run.now = 5.0
    run.finish()
    assert run.reason("a") == "length"


@pytest.mark.parametrize("overload", ["drop", "", None, 3])
def test_an_unknown_way_to_meet_overload_is_refused(overload):
    with pytest.raises(ConfigError, match="overload="):
        SchedulerConfig(8, 8, 100, overload=overload)


def test_a_prefill_that_seems_to_cost_nothing_is_in_nobodys_way():
    """Once such a fit, of steps whose times depend on the context alone, ended the loop."""
    run = Run(num_blocks=200, budget=10, policy="deadline")
    for i in range(40):
        size = 1 + i % 7
        run.scheduler.cost.observe(StepFeatures(8 - i % 7, 100 * size, 0.0), 0.01 * size**2)
    assert run.scheduler.cost.fitted
    assert run.scheduler.cost.prefill_seconds(10, alone=True) == 0
    for i in range(3):
        run.add(str(i), range(i, i + 20), max_tokens=3, ttft_slo=5.0)
    run.step()
    assert not demoted(run)
    run.finish()
