"""A request that is about to be moved stands still: it keeps its blocks, and nobody starves."""

from __future__ import annotations

import pytest
from harness import Run, solo

from pagedkv.errors import PagedKVError
from pagedkv.scheduling.explain import explain
from pagedkv.scheduling.messages import Delta

PROMPT = [7, 8, 9, 10, 12, 13, 14]


def steps(run: Run, count: int) -> list[Delta]:
    return [delta for _ in range(count) for delta in run.step()]


def test_it_draws_nothing_and_goes_on_with_the_same_tokens() -> None:
    run = Run()
    run.add("a", PROMPT, max_tokens=6)
    run.add("b", [1, 2, 3], max_tokens=20)
    steps(run, 2)
    drawn = run.tokens["a", 0].copy()
    held = run.manager.block_table(run.scheduler.sequences[0]).tolist()
    resume = run.scheduler.park("a", 0.0)
    assert resume is not None and list(resume.outputs[0].tokens) == drawn
    assert {delta.request_id for delta in steps(run, 5)} == {"b"}
    assert run.tokens["a", 0] == drawn
    assert run.manager.block_table(run.scheduler.sequences[0]).tolist() == held
    run.scheduler.unpark("a", 0.0)
    run.finish()
    assert run.tokens["a", 0] == solo(PROMPT, max_tokens=6)
    story = explain(run.scheduler.log.decisions, "a")
    assert "stood still from step 2 on with 7 tokens, to be moved" in story
    assert "was not moved and went on in step 7" in story


@pytest.mark.parametrize("first", [True, False])
def test_its_blocks_are_nobodys_and_whoever_is_left_waits_for_them(first: bool) -> None:
    """Neither is preempted, and the one that runs is not cut short: blocks will come."""
    run = Run(num_blocks=5, block_size=2, budget=8)
    names = ("a", "b") if first else ("b", "a")
    for name in names:
        run.add(name, [5 if name == "a" else 6, 2, 3, 4], max_tokens=5)
    steps(run, 1)
    assert run.scheduler.park("a", 0.0) is not None
    steps(run, 6)
    assert run.scheduler.stats.num_preemptions == 0
    assert run.core.has_unfinished() and ("b", 0) not in run.ends
    waited = len(run.tokens["b", 0])
    assert 0 < waited < 5
    run.core.release("a", 0.0)
    run.finish()
    assert run.tokens["b", 0] == solo([6, 2, 3, 4], max_tokens=5)
    assert run.ends["b", 0].error is None


def test_others_are_preempted_and_not_the_parked() -> None:
    run = Run(num_blocks=8, block_size=2, budget=12)
    for name in "abc":
        run.add(name, ["abc".index(name), 2, 3], max_tokens=6)
    steps(run, 1)
    assert run.scheduler.park("c", 0.0) is not None  # the last would yield
    steps(run, 4)
    assert run.scheduler.stats.num_preemptions == 1
    assert run.request("c").branches and not run.request("b").branches
    run.scheduler.unpark("c", 0.0)
    run.finish()
    for name in "abc":
        assert run.tokens[name, 0] == solo(["abc".index(name), 2, 3], max_tokens=6)


def test_a_waiting_request_with_more_to_say_does_not_preempt_it() -> None:
    run = Run(max_num_seqs=1, policy="priority")
    run.add("a", PROMPT, max_tokens=3)
    steps(run, 1)
    assert run.scheduler.park("a", 0.0) is not None
    run.add("b", PROMPT, max_tokens=1, tenant="x")
    steps(run, 3)
    assert ("b", 0) not in run.tokens and run.request("a").branches
    run.core.release("a", 0.0)
    run.finish()
    assert run.tokens["b", 0] == solo(PROMPT, max_tokens=1)


def test_it_can_be_aborted_and_expire() -> None:
    run = Run()
    run.add("a", PROMPT, max_tokens=6)
    run.add("b", PROMPT, max_tokens=6, deadline=5.0)
    steps(run, 2)
    for name in "ab":
        assert run.scheduler.park(name, 0.0) is not None
    run.abort("a")
    run.now = 6.0
    run.step()
    assert (run.reason("a"), run.reason("b")) == ("abort", "deadline")
    run.check_idle()


def test_only_what_runs_between_two_steps_can_be_parked() -> None:
    run = Run(max_num_seqs=1)
    run.add("a", PROMPT, max_tokens=3)
    run.add("b", PROMPT, max_tokens=3)
    steps(run, 1)
    assert run.scheduler.park("b", 0.0) is None  # it waits
    with pytest.raises(KeyError):
        run.scheduler.park("c", 0.0)
    step = run.scheduler.plan(0.0)
    assert step is not None
    for call in (run.scheduler.park, run.scheduler.unpark, run.scheduler.release):
        with pytest.raises(PagedKVError, match="in flight"):
            call("a", 0.0)
    run.scheduler.commit(run.toy.collect(run.toy.submit(step)), 0.0)
    run.abort("a")
    run.abort("b")
    run.step()
