"""Whatever happens around a request, its tokens are those it gets alone."""

from __future__ import annotations

import random

import pytest
from harness import Run, solo
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCK_SIZES = (1, 2, 3, 4, 16)


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    """A few stems and random cuts: full, partial and no common prefixes."""
    stem = [rng.choice((1, 2))] * 3 + list(range(3, 3 + longest))
    cut = rng.randint(0, longest - 1)
    tail = [rng.randint(30, 33) for _ in range(rng.randint(0, longest - cut))]
    return (stem[:cut] + tail)[:longest] or [7]


def random_params(rng: random.Random, n: int) -> dict[str, object]:
    return {
        "temperature": rng.choice((0.0, 1.0)),
        "max_tokens": rng.randint(1, 8),
        "n": n,
    }


def check_against_solo(run: Run, requests: dict[str, tuple], cut_ok: set[str]) -> None:
    """Every sample is its solo run; one that was aborted or cut short is the beginning of it."""
    for name, (prompt, seed, params) in requests.items():
        alone = {k: v for k, v in params.items() if k != "n"}
        for i in range(params["n"]):
            expected = solo(prompt, seed + i, **alone)
            got = run.tokens[name, i]
            end = run.ends[name, i]
            if end.error is not None:
                check_cut(run, name, len(prompt), params["n"])
            short = name in cut_ok or end.error is not None
            assert got == (expected[: len(got)] if short else expected), (name, i, end)


def check_cut(run: Run, name: str, prompt: int, n: int) -> None:
    """Only a request that takes more than the whole pool alone may be cut short."""
    size = run.manager.block_size
    shared = prompt // size
    lengths = [prompt + len(run.tokens[name, i]) for i in range(n)]
    assert shared + sum(-(-length // size) - shared for length in lengths) > run.manager.num_blocks


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from(BLOCK_SIZES),
    num_blocks=st.integers(1, 16),
    budget=st.integers(1, 12),
    caching=st.booleans(),
)
def test_random_arrivals_aborts_and_preemptions(seed, block_size, num_blocks, budget, caching):
    rng = random.Random(seed)
    run = Run(num_blocks, block_size, budget, max_num_seqs=5, prefix_caching=caching)
    longest = min(20, num_blocks * block_size)
    requests: dict[str, tuple] = {}
    disturbed = set()
    for name in "abcdefgh":
        n = min(rng.choice((1, 1, 1, 2, 4)), budget)
        requests[name] = (random_prompt(rng, longest), rng.randint(0, 99), random_params(rng, n))
        prompt, key, params = requests[name]
        run.add(name, prompt, key, tenant=rng.choice((None, "x")), **params)
        for _ in range(rng.randint(0, 4)):
            run.step()
            if rng.random() < 0.2:
                run.preempt(rng.choice(sorted(requests)))
        if rng.random() < 0.2:
            victim = rng.choice(sorted(requests))
            sample = rng.choice((None, 0, 1))
            disturbed.add(victim)
            run.abort(victim, sample)
    run.finish()
    check_against_solo(run, requests, disturbed)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("n", [1, 4])
def test_forced_preemption_at_every_step_of_a_short_run(block_size, n):
    """Also between the chunks of the prompt's own part, for the common one is computed once."""
    prompt, params = list(range(1, 11)), {"temperature": 1.0, "max_tokens": 6, "n": n}
    other = [1, 2, 3, 4, 9], {"temperature": 0.0, "max_tokens": 6, "n": 1}
    steps, forced_at = 12, 0
    for at in range(steps):
        run = Run(num_blocks=40, block_size=block_size, budget=5)
        run.add("other", other[0], **other[1])
        run.add("a", prompt, 3, **params)
        forced = False
        for i in range(steps):
            if i == at:
                forced = run.preempt("a")
            if run.core.has_unfinished():
                run.step()
        run.finish()
        forced_at += forced
        check_against_solo(run, {"a": (prompt, 3, params), "other": (other[0], 0, other[1])}, set())
    assert forced_at >= 6


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_preemption_before_every_step(block_size):
    """Recomputing all the time still moves on as long as a step reaches the end."""
    prompt, params = list(range(1, 8)), {"temperature": 1.0, "max_tokens": 5, "n": 1}
    run = Run(num_blocks=20, block_size=block_size, budget=20, prefix_caching=False)
    run.add("a", prompt, 5, **params)
    for _ in range(4):
        run.step()
        assert run.preempt("a")
    run.finish()
    check_against_solo(run, {"a": (prompt, 5, params)}, set())
    lens = [step.query_lens.tolist() for step in run.steps]
    assert lens == [[7], [8], [9], [10], [11]]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_samples_of_a_group_store_the_prompt_once(block_size):
    prompt = list(range(1, 11))
    run = Run(num_blocks=64, block_size=block_size, budget=16)
    params = {"temperature": 1.0, "max_tokens": 3, "n": 4}
    run.add("a", prompt, 7, **params)
    run.step()
    assert run.manager.num_held_blocks == -(-10 // block_size)
    assert [len(s.samples) for s in run.steps] == [4]
    run.step()
    own = 3 if 10 % block_size else 4  # the last writer keeps the partial tail
    assert run.manager.num_held_blocks == -(-10 // block_size) + own
    assert len(run.steps[1].copies) == (3 if 10 % block_size else 0)
    run.finish()
    check_against_solo(run, {"a": (prompt, 7, params)}, set())


def test_sample_i_of_seed_s_is_sample_0_of_seed_s_plus_i():
    run = Run()
    run.add("group", [1, 2, 3], 10, temperature=1.0, max_tokens=6, n=4)
    for i in range(4):
        run.add(f"single{i}", [1, 2, 3], 10 + i, temperature=1.0, max_tokens=6)
    run.finish()
    samples = [run.tokens["group", i] for i in range(4)]
    assert samples == [run.tokens[f"single{i}", 0] for i in range(4)]
    assert len({tuple(s) for s in samples}) == 4


def test_equal_inputs_give_equal_steps():
    def steps() -> list[dict[str, object]]:
        rng = random.Random(4)
        run = Run(num_blocks=7, block_size=3, budget=7)
        for i in range(12):
            run.add(str(i), random_prompt(rng, 15), i, **random_params(rng, rng.choice((1, 3))))
            run.step()
            if i % 5 == 4:
                run.abort(str(i - 1))
        run.finish()
        assert run.scheduler.stats.num_preemptions > 0
        return [
            {
                name: getattr(step, name).tolist()
                for name in ("seqs", "slots", "copies", "tokens", "changed_rows", "changed_tables")
            }
            for step in run.steps
        ]

    assert steps() == steps()
