"""Requests that arrive together compute what they have in common once."""

from __future__ import annotations

import random

import pytest
from harness import Run, solo
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_solo_equality import check_against_solo, random_params, random_prompt

from pagedkv.engine.toy import ToyExecutor
from pagedkv.scheduling.siblings import MAX_PASSINGS

STEM = list(range(1, 9))  # two blocks of 4


class FailsOnce(ToyExecutor):
    """The step of index 0 fails as a whole."""

    def submit(self, step):
        if step.index == 0:
            raise RuntimeError("lost")
        return super().submit(step)


def computed(run: Run) -> int:
    return sum(step.num_tokens for step in run.steps)


def lens(run: Run) -> list[list[int]]:
    return [step.query_lens.tolist() for step in run.steps]


def family(run: Run, size: int, **params) -> None:
    """Requests "0", "1", ... of STEM and one token of their own."""
    for i in range(size):
        run.add(str(i), [*STEM, 20 + i], max_tokens=1, **params)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_common_prefix_is_computed_once(size):
    run = Run(budget=64)
    family(run, size)
    run.finish()
    assert lens(run) == [[9], [1] * (size - 1)]
    assert [run.cached(str(i)) for i in range(size)] == [0, *[8] * (size - 1)]
    for i in range(size):
        assert run.tokens[str(i), 0] == solo([*STEM, 20 + i], max_tokens=1)


def test_equal_prompts_of_whole_blocks_are_computed_once():
    """One token is left to compute, in a copy of the last block."""
    run = Run(budget=64)
    for name in "abc":
        run.add(name, STEM, max_tokens=1)
    run.finish()
    assert lens(run) == [[8], [1, 1]]


def test_a_common_part_within_the_first_block_is_not_waited_for():
    run = Run(budget=64)
    run.add("a", [1, 2, 3, 4, 5], max_tokens=1)
    run.add("b", [1, 2, 3, 9, 5], max_tokens=1)
    run.finish()
    assert lens(run) == [[5, 5]]


def test_without_prefix_caching_nobody_waits():
    run = Run(budget=64, prefix_caching=False)
    family(run, 3)
    run.finish()
    assert lens(run) == [[9, 9, 9]]


def test_tenants_never_wait_for_each_other():
    run = Run(budget=64)
    for tenant in ("x", "y", None):
        run.add(str(tenant), [*STEM, 20], max_tokens=1, tenant=tenant)
    run.finish()
    assert lens(run) == [[9, 9, 9]]


def test_a_sibling_does_not_hold_up_strangers_and_keeps_its_place():
    run = Run(budget=64, max_num_seqs=2)
    family(run, 2)
    run.add("stranger", range(30, 40), max_tokens=1)
    run.step()
    # The second seat is the sibling's.
    assert lens(run) == [[9]]
    run = Run(budget=64, max_num_seqs=3)
    family(run, 2)
    run.add("stranger", range(30, 40), max_tokens=1)
    run.finish()
    assert lens(run) == [[9, 10], [1]]


def test_the_blocks_of_one_who_waits_are_set_aside():
    """Five blocks: three for the first, one more for its sibling, and not two for a stranger."""
    run = Run(num_blocks=5, budget=64)
    family(run, 2)
    run.add("large", range(30, 36), max_tokens=1)
    run.step()
    assert lens(run) == [[9]]
    run = Run(num_blocks=5, budget=64)
    family(run, 2)
    run.add("small", range(30, 33), max_tokens=1)
    run.finish()
    assert lens(run) == [[9, 3], [1]]


def test_a_sibling_waits_again_while_a_long_prefix_is_computed_in_chunks():
    """And the prefill has the whole budget, for none of it is of use to who waits."""
    run = Run(budget=8)
    prefix = list(range(1, 17))
    run.add("a", [*prefix, 20], max_tokens=1)
    run.add("b", [*prefix, 21], max_tokens=1)
    run.finish()
    assert computed(run) == 18 and run.cached("b") == 16
    assert lens(run) == [[8], [8], [1, 1]]


def test_nobody_is_passed_over_more_often_than_the_limit():
    run = Run(budget=8, num_blocks=64)
    prefix = [1 + i % 40 for i in range(8 * MAX_PASSINGS + 40)]
    run.add("a", [*prefix, 45], max_tokens=1)
    run.add("b", [*prefix, 46], max_tokens=1)
    for passed in range(1, MAX_PASSINGS + 1):
        run.step()
        assert run.request("b").num_passings == passed and not run.request("b").branches
    run.step()
    assert run.request("b").branches
    run.finish()
    assert run.cached("b") == 8 * MAX_PASSINGS


def test_generated_tokens_are_waited_for_too():
    first = solo(STEM[:3], max_tokens=2)
    run = Run(budget=64)
    run.add("a", STEM[:3], max_tokens=6)
    run.step()
    run.add("b", [*STEM[:3], *first, 7], max_tokens=1)
    run.step()  # the fourth token, the first drawn one, fills the block
    assert lens(run) == [[3], [1]]
    run.finish()
    assert run.cached("b") == 4


@pytest.mark.parametrize("how", ["abort", "preempt", "fail"])
def test_who_waited_goes_on_when_the_leader_is_gone(how):
    toy = FailsOnce(64, 4, 50) if how == "fail" else None
    run = Run(budget=8, executor=toy, errors_ok=how == "fail")
    prefix = list(range(1, 13))
    run.add("a", [*prefix, 20], max_tokens=1)
    run.add("b", [*prefix, 21], max_tokens=1)
    run.step()
    assert not run.request("b").branches and run.request("b").num_passings == 1
    if how == "abort":
        run.abort("a")
    elif how == "preempt":
        assert run.preempt("a")
    run.finish()
    assert run.tokens["b", 0] == solo([*prefix, 21], max_tokens=1)
    if how == "preempt":
        assert computed(run) == 14
    else:  # nobody is left to wait for
        assert [len(row) for row in lens(run)] == [1] * len(run.steps)
        assert run.ends["a", 0].finish_reason == ("abort" if how == "abort" else "error")


@pytest.mark.parametrize("n", [1, 3])
def test_groups_lead_and_wait_as_one(n):
    run = Run(budget=64)
    for i in range(2):
        run.add(str(i), [*STEM, 20 + i], 5, max_tokens=2, n=n, temperature=1.0)
    run.finish()
    assert lens(run)[0] == [9]
    assert run.cached("1") == 8
    requests = {
        str(i): ([*STEM, 20 + i], 5, {"max_tokens": 2, "n": n, "temperature": 1.0})
        for i in range(2)
    }
    check_against_solo(run, requests, set())


def test_a_leader_whose_blocks_get_no_names_is_not_waited_for():
    """After a reset what runs publishes nothing more, though others name the same beginning."""
    prompt, drawn = STEM[:7], solo(STEM[:7], max_tokens=5)
    run = Run(budget=64)
    run.add("a", prompt, max_tokens=8)
    run.step()
    run.manager.reset_cache()
    run.step()
    run.add("b", [*prompt, drawn[0], 45], max_tokens=1)
    for _ in range(3):
        run.step()
    run.add("c", [*prompt, *drawn, 46], max_tokens=1)
    run.step()  # "a" fills its third block
    assert lens(run) == [[7], [1], [1, 9], [1], [1], [1, 5]]
    run.finish()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from((1, 2, 4)),
    num_blocks=st.integers(6, 40),
    budget=st.integers(1, 16),
)
@example(seed=0, block_size=1, num_blocks=6, budget=1)
def test_families_end_as_alone_and_are_passed_over_a_bounded_number_of_times(
    seed, block_size, num_blocks, budget
):
    rng = random.Random(seed)
    run = Run(num_blocks, block_size, budget, max_num_seqs=6)
    longest = min(16, num_blocks * block_size - 1)
    requests: dict[str, tuple] = {}
    stopped: set[str] = set()
    while len(requests) < 12:
        prompt = random_prompt(rng, longest)
        for _ in range(rng.randint(1, 4)):
            name = str(len(requests))
            n = min(rng.choice((1, 1, 2)), budget)
            own = [*prompt[: rng.randint(1, len(prompt))], rng.randint(30, 33)][:longest]
            requests[name] = (own, rng.randint(0, 99), random_params(rng, n))
            tenant = rng.choice((None, None, "x"))
            run.add(name, own, requests[name][1], tenant=tenant, **requests[name][2])
        for _ in range(rng.randint(0, 3)):
            waiting = run.core.has_unfinished()
            before = len(run.steps)
            ended = len(run.ends)
            run.step()
            # Whoever waits for others waits for rows of a step.
            assert not waiting or len(run.steps) > before or len(run.ends) > ended
            assert all(
                r.num_passings <= MAX_PASSINGS for r in run.scheduler._roster.requests.values()
            )
        if rng.random() < 0.3:
            run.preempt(rng.choice(sorted(requests)))
        if rng.random() < 0.2:
            victim = rng.choice(sorted(requests))
            stopped.add(victim)
            run.abort(victim)
    run.finish()
    check_against_solo(run, requests, stopped)
