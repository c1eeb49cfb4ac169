"""A request that enters with tokens goes on as if it had never been away."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from engine_oracle import drawn as drawn_alone
from engine_oracle import plain, prompt_scores
from harness import Run, solo
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.errors import RequestError
from pagedkv.scheduling.explain import explain
from pagedkv.scheduling.messages import Add, Delta, Drain, Drawn, Resume
from pagedkv.scheduling.params import BeamSearchParams, SamplingParams

PROMPT = [7, 8, 9, 10, 12, 13, 14]


def request(name: str = "a", prompt: Iterable[int] = PROMPT, seed: int = 5, **params) -> Add:
    return Add(name, tuple(prompt), SamplingParams(**params), 0.0, seed)


def emitted(run: Run, add: Add) -> tuple[Drawn, ...]:
    """What a front end knows: tokens and ends of the samples, as they were delivered."""
    ends = [run.ends.get((add.request_id, i)) for i in range(add.params.n)]
    return tuple(
        Drawn(tuple(run.tokens.get((add.request_id, i), ())), end and end.finish_reason)
        for i, end in enumerate(ends)
    )


def enter(run: Run, resume: Resume) -> None:
    """Into a checked engine, which counts what the request has had elsewhere as well."""
    name, usage = resume.request_id, resume.usage
    run.recorder.blocks_peak[name] = usage.blocks_peak
    run.recorder.again[name] = usage.recomputed_tokens
    longest = max(len(output.tokens) for output in resume.outputs)
    run.recorder.had[name] = len(resume.add.prompt) + longest - 1 if longest else 0
    run.core.send(resume)


def take_out(run: Run, name: str) -> Resume:
    """Between two steps; nothing of it is left behind, and nothing reported."""
    resume = run.core.release(name, run.now)
    run.check()
    return resume


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_cut_at_any_token(n: int, temperature: float, block_size: int) -> None:
    add = request(n=n, temperature=temperature, max_tokens=7, logprobs=2)
    whole = Run(block_size=block_size)
    whole.core.send(add)
    whole.finish()
    logprobs = [
        [plain(score) for d in whole.deltas if d.sample == i for score in d.logprobs]
        for i in range(n)
    ]
    for cut in range(7):
        run = Run(block_size=3)
        outputs = tuple(Drawn(tuple(whole.tokens["a", i][:cut])) for i in range(n))
        enter(run, Resume(add, outputs))
        run.finish()
        for i in range(n):
            assert [*outputs[i].tokens, *run.tokens["a", i]] == whole.tokens["a", i]
            mine = [plain(score) for d in run.deltas if d.sample == i for score in d.logprobs]
            assert mine == logprobs[i][cut:]
            assert run.reason("a", i) == "length"


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.tuples(st.sampled_from((1, 2, 3, 4, 16)), st.sampled_from((1, 2, 3, 4, 16))),
    steps=st.integers(1, 25),
    told=st.booleans(),
)
def test_a_worker_dies_and_all_its_requests_go_on_elsewhere(seed, sizes, steps, told) -> None:
    """told: they are moved by the worker itself; else resumed from what was delivered."""
    rng = random.Random(seed)
    eos = (3, 11)
    old, new = (
        Run(80 // size + 8, size, rng.randint(4, 12), max_num_seqs=8, eos=eos) for size in sizes
    )
    adds = [
        request(
            name,
            [rng.randint(0, 3) for _ in range(rng.randint(1, 20))],
            rng.randint(0, 99),
            n=rng.choice((1, 1, 2, 4)),
            temperature=rng.choice((0.0, 1.0)),
            max_tokens=rng.randint(1, 12),
            stop_token_ids=rng.choice(([], [4, 5, 6])),
        )
        for name in "abcdef"
    ]
    for add in adds:
        old.core.send(add)
        if rng.random() < 0.5:
            old.step()
    for _ in range(steps):
        old.step()
        if rng.random() < 0.1:
            old.preempt(rng.choice("abcdef"))
    had = {add.request_id: emitted(old, add) for add in adds}
    for add in adds:
        if old.request(add.request_id) is not None:
            told_by = take_out(old, add.request_id)
            assert [o.tokens for o in told_by.outputs] == [o.tokens for o in had[add.request_id]]
            assert told_by.add == add
            enter(new, told_by if told else Resume(add, had[add.request_id]))
    new.finish()
    for add in adds:
        name = add.request_id
        for i in range(add.params.n):
            tokens = (*had[name][i].tokens, *new.tokens.get((name, i), ()))
            end = old.ends.get((name, i)) or new.ends[name, i]
            expected = drawn_alone(add, i, eos, 200)
            assert (tokens, end.finish_reason, end.stop_reason) == expected
    old.check_idle()


@pytest.mark.parametrize("steps", range(1, 7))
def test_beams_go_on_along_their_fork_tree(steps: int) -> None:
    beam = BeamSearchParams(3, 7)
    add = Add("a", tuple(PROMPT), beam.sampling, 0.0, 0, beam=beam)
    runs = [Run(eos=(3, 11), block_size=size) for size in (4, 4, 3)]
    for run in runs[:2]:
        run.core.send(add)
    whole = runs[0].finish()
    for _ in range(steps):
        runs[1].step()
    resume = take_out(runs[1], "a")
    enter(runs[2], resume)
    runs[2].finish()
    for i in range(3):
        mine, theirs = runs[2].ends["a", i], whole.ends["a", i]
        assert (mine.token_ids, mine.score, mine.finish_reason) == (
            theirs.token_ids,
            theirs.score,
            theirs.finish_reason,
        )


@pytest.mark.parametrize("steps", range(1, 6))
def test_prompt_scores_that_were_reported_are_not_reported_again(steps: int) -> None:
    add = request(prompt=range(1, 12), temperature=0.0, max_tokens=3, prompt_logprobs=1)
    old, new = Run(budget=3), Run(budget=4)
    old.core.send(add)
    for _ in range(steps):
        old.step()
    enter(new, take_out(old, "a"))
    new.finish()
    whole = Run()
    whole.core.send(add)
    whole.finish()
    deltas: list[Delta] = [*old.deltas, *new.deltas]
    assert prompt_scores(deltas) == prompt_scores(whole.deltas)


def test_it_goes_before_those_who_have_not_started_and_is_no_prefix_hit() -> None:
    run = Run(max_num_seqs=1, max_num_waiting=1, policy="fair")
    run.add("runs", [1, 2, 3], max_tokens=4)
    run.step()
    run.add("waits", [4, 5, 6], max_tokens=1)
    run.step()
    enter(run, Resume(request(temperature=0.0, max_tokens=4), (Drawn((1, 2)),)))
    run.finish()
    order = [delta.request_id for delta in run.deltas if delta.finish_reason is not None]
    assert order == ["runs", "a", "waits"]
    counters = run.scheduler.counters
    assert counters.readmission_queries == len(PROMPT) + 2
    assert counters.prefix_cache_queries == 6
    # Nobody is charged for what was computed elsewhere.
    assert run.scheduler._roster.policy.counters.num_started(None) == 0


def test_its_times_are_moved_to_the_clock_of_the_receiver() -> None:
    """It had 3 of its 10 seconds left, wherever the clocks stand."""
    add = replace(request(temperature=0.0, max_tokens=50), arrival=1000.0, deadline=1010.0)
    run = Run()
    run.now = 20.0
    enter(run, Resume(add, (Drawn((1, 2)),), sent_at=1007.0, first_token_at=1001.0))
    run.step()
    found = run.request("a")
    assert found is not None
    assert (found.arrival, found.first_token_at, found.deadline) == (13.0, 14.0, 23.0)
    run.now = 23.0
    run.step()
    assert ("a", 0) not in run.ends
    run.now = 23.5
    run.step()
    assert run.ends["a", 0].finish_reason == "deadline"
    run.check_idle()


def test_the_deadline_of_one_that_has_left_is_nobodys() -> None:
    """It comes back under its name, with another one."""
    run = Run()
    run.add("a", PROMPT, max_tokens=50, deadline=5.0)
    run.step()
    resume = take_out(run, "a")
    enter(run, replace(resume, add=replace(resume.add, deadline=9.0)))
    run.step()
    run.now = 6.0
    run.step()
    assert ("a", 0) not in run.ends
    run.now = 9.5
    run.step()
    assert run.reason("a") == "deadline"
    run.check_idle()


def test_a_sample_at_the_limits_of_the_receiver_ends_there() -> None:
    tokens = tuple(solo(PROMPT, 5, temperature=0.0, max_tokens=6))
    for run, reason in (
        (Run(max_model_len=len(PROMPT) + 6), "longest"),
        (Run(num_blocks=3, block_size=4), "capacity"),
        (Run(eos=(tokens[-1],)), "end token"),
    ):
        enter(run, Resume(request(temperature=0.0, max_tokens=9), (Drawn(tokens),)))
        run.step()
        end = run.ends["a", 0]
        assert end.finish_reason == ("stop" if reason == "end token" else "length")
        assert (end.error is not None) == (reason == "capacity") and end.token_ids == ()
        assert end.usage is not None
        run.check_idle()


@pytest.mark.parametrize(
    ("outputs", "why"),
    [
        ((Drawn(),), "1 outputs"),
        ((Drawn((1,), "stop"), Drawn((2,), "length")), "all outputs"),
        ((Drawn((1,)), Drawn()), "drawn nothing"),
        ((Drawn((1,)), Drawn((50,))), "vocabulary"),
        ((Drawn((1,)), Drawn((1,), "done")), "finish_reason"),
    ],
)
def test_what_nobody_can_have_drawn_is_refused(outputs: tuple[Drawn, ...], why: str) -> None:
    run = Run(errors_ok=True)
    run.core.send(Resume(request(n=2), outputs))
    run.step()
    ends = [end for end in run.ends.values() if end.finish_reason == "error"]
    assert len(ends) in (1, 2) and all(why in str(end.error) for end in ends)
    assert all(end.error_type == "invalid" for end in ends)
    run.check_idle()


def test_a_draining_engine_and_an_id_in_use_refuse_it() -> None:
    run = Run(errors_ok=True)
    run.add("a", PROMPT, max_tokens=2)
    with pytest.raises(RequestError, match="in use"):
        run.core.send(Resume(request(), (Drawn((1,)),)))
    run.core.send(Drain())
    run.core.send(Resume(request("b", n=2), (Drawn((1,), "stop"), Drawn((1,)))))
    run.finish()
    assert run.ends["b", 1].error_type == "draining" and ("b", 0) not in run.ends


def test_the_log_says_that_it_came_from_elsewhere() -> None:
    run = Run()
    enter(run, Resume(request(temperature=0.0, max_tokens=4), (Drawn((1, 2)),)))
    run.finish()
    story = explain(run.scheduler.log.decisions, "a")
    assert "came from elsewhere with 2 tokens drawn: 7 prompt tokens, 1 sample;" in story
    assert "resumed in step 0" in story and "fallen out" not in story
