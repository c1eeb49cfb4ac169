"""Beams as sequences of the scheduler, over the toy model: sharing, preemption, endings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from harness import VOCAB, Run

from pagedkv.cache import SeqId
from pagedkv.engine.toy import ToyExecutor
from pagedkv.errors import RequestError
from pagedkv.scheduling.beams import (
    BeamSearch,
    common_length,
    split,
    start_search,
    tree_blocks,
)
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import BeamSearchParams, SamplingParams
from pagedkv.scheduling.report import extend_search
from pagedkv.scheduling.request import Branch, Request
from pagedkv.scheduling.step import Result, Step, TokenLogprobs
from pagedkv.scheduling.validate import validate_add

EOS = (3, 11)
PROMPT = [7, 8, 9, 10, 12, 13, 14]
Found = list[tuple[tuple[int, ...], float | None, str | None]]


def add(run: Run, name: str, prompt: list[int], beam: BeamSearchParams) -> None:
    run.core.send(Add(name, tuple(prompt), beam.sampling, run.sent, 0, beam=beam))
    run.sent += 1


def found(run: Run, name: str, width: int) -> Found:
    ends = [run.ends[name, i] for i in range(width)]
    return [(end.token_ids, end.score, end.finish_reason) for end in ends]


def alone(prompt: list[int], beam: BeamSearchParams, eos: tuple[int, ...] = EOS) -> Found:
    """In a fresh engine with room for everything."""
    run = Run(num_blocks=200, block_size=16, budget=64, eos=eos, prefix_caching=False)
    add(run, "solo", prompt, beam)
    return found(run.finish(), "solo", beam.beam_width)


def tree(run: Run, name: str) -> int:
    """Blocks that the running beams of a request take when all common ones are shared."""
    size = run.manager.block_size
    request = run.request(name)
    if request is None:
        return 0
    return len(
        {
            tuple(branch.tokens(0, min(end, branch.computed)))
            for branch in request.branches
            for end in range(size, branch.computed + size, size)
        }
    )


def scored(values: dict[int, float]) -> TokenLogprobs:
    """What a row gives: its best token, then all of them."""
    ids = sorted(values, key=lambda token: (-values[token], token))
    ids = [ids[0], *ids]
    return TokenLogprobs(
        np.array(ids, np.int32), np.array([values[i] for i in ids], np.float32), rank=1
    )


# ---- choosing


def test_the_best_continuations_of_all_beams_go_on() -> None:
    search = BeamSearch(BeamSearchParams(2, 9), eos=(0,), limit=9)
    beams = [([5], -1.0), ([6], -1.5)]
    children = search.extend(
        beams, [scored({1: -0.5, 2: -2.0, 3: -3.0, 4: -4.0}), scored({1: -0.25, 2: -0.5})]
    )
    assert children == [(0, 1, -1.5), (1, 1, -1.75)]


def test_equal_sums_go_to_the_earlier_beam_and_the_lower_token() -> None:
    search = BeamSearch(BeamSearchParams(2, 9), eos=(0,), limit=9)
    same = scored({1: -0.5, 2: -0.5, 3: -0.5, 4: -0.5})
    assert [c[:2] for c in search.extend([([5], -1.0), ([6], -1.0)], [same, same])] == [
        (0, 1),
        (0, 2),
    ]


def test_an_end_token_counts_only_among_the_best_beam_width() -> None:
    search = BeamSearch(BeamSearchParams(2, 9, length_penalty=2.0), eos=(0,), limit=9)
    first = scored({1: -0.5, 0: -1.0, 2: -2.0, 3: -3.0})
    children = search.extend([([], 0.0)], [first])
    assert [child.token for child in children] == [1, 2]
    assert [(h.tokens, h.score) for h in search.finished] == [((0,), -1.0)]
    late = scored({4: -0.1, 5: -0.2, 0: -0.3, 6: -4.0})
    children = search.extend([([1], -0.5), ([2], -2.0)], [late, late])
    assert [child.token for child in children] == [4, 5]
    assert len(search.finished) == 1


def test_the_end_token_counts_for_the_length() -> None:
    search = BeamSearch(BeamSearchParams(1, 9, length_penalty=2.0), eos=(0,), limit=9)
    assert search.extend([([7], -1.0)], [scored({0: -1.0, 1: -50.0})]) == []
    assert [(h.tokens, h.score, h.finish_reason) for h in search.finished] == [
        ((7, 0), -0.5, "stop")
    ]


@pytest.mark.parametrize("early", [False, True])
def test_when_the_search_is_over(early: bool) -> None:
    """With the set full, or when the best beam would not improve it if it ended now."""
    params = BeamSearchParams(2, 9, length_penalty=0.0, early_stopping=early)
    search = BeamSearch(params, eos=(0,), limit=9)
    first = scored({1: -0.5, 0: -1.0, 2: -1.1, 3: -9.0})
    assert search.extend([([], 0.0)], [first]) == [(0, 1, -0.5), (0, 2, pytest.approx(-1.1))]
    beams = [([1], -0.5), ([2], -1.1)]
    second = [scored({4: -0.9, 0: -2.0, 5: -9.0, 6: -9.0}), scored(dict.fromkeys(range(4), -9.0))]
    going = search.extend(beams, second)
    assert [h.score for h in search.finished] == [-1.0, -2.5]
    if early:
        assert going == []
        return
    assert going[0] == (0, 4, pytest.approx(-1.4))
    third = [scored({4: -2.0, 5: -3.0, 6: -9.0, 7: -9.0})] * 2
    assert search.extend([([1, 4], -1.4), ([1, 5], -9.5)], third) == []
    assert [h.tokens for h in search.finished] == [(0,), (1, 0)]


def test_the_last_token_allowed_ends_every_beam() -> None:
    search = BeamSearch(BeamSearchParams(2, 2), eos=(0,), limit=2)
    rows = [scored({1: -1.0, 2: -2.0, 3: -3.0, 0: -0.5})] * 2
    assert search.extend([([1], -1.0), ([2], -1.0)], rows) == []
    assert [(h.tokens, h.finish_reason) for h in search.finished] == [
        ((1, 0), "stop"),
        ((2, 0), "stop"),
    ]
    search = BeamSearch(BeamSearchParams(2, 2, ignore_eos=True), eos=(0,), limit=2)
    search.extend([([1], -1.0), ([2], -4.0)], rows)
    assert [(h.tokens, h.finish_reason) for h in search.finished] == [
        ((1, 0), "length"),
        ((1, 1), "length"),
    ]


def test_the_best_hypotheses_are_kept_in_order() -> None:
    search = BeamSearch(BeamSearchParams(2, 9, length_penalty=0.0), eos=(0,), limit=9)
    rows = [scored({0: -2.0, 4: -2.5, 5: -9.0, 6: -9.0}), scored({0: -3.0, 4: -9.0})]
    search.extend([([1], -1.0), ([2], -5.0)], rows)
    search.extend([([1], -0.5), ([2], -0.25)], rows)
    search.extend([([1], 0.0), ([2], -9.0)], rows)
    assert [h.score for h in search.finished] == [-2.0, -2.5]


def test_equal_beams_keep_their_rank_wherever_their_branches_stand() -> None:
    """Tokens 7 and 8 tie: the beam that was the better one before goes first."""
    beam = BeamSearchParams(2, 9)
    config = SchedulerConfig(8, 8, 100, (0,), VOCAB)
    entry = Add("b", (1, 2), beam.sampling, 0.0, 0, beam=beam)
    request = Request(entry, 0, start_search(entry, config))
    request.outputs[0].tokens, request.outputs[1].tokens = [5], [6]
    branches = [Branch(request, SeqId(i), [request.outputs[i]], 2) for i in (1, 0)]
    rows = [scored({7: -1.0, 3: -9.0}), scored({8: -1.0, 3: -9.0})]
    heirs = extend_search(request, list(zip(branches, rows, strict=True)))
    assert [output.tokens for output in request.outputs] == [[5, 8], [6, 7]]
    assert heirs == {branches[1]: [request.outputs[0]], branches[0]: [request.outputs[1]]}


def test_a_hypothesis_ends_at_max_model_len() -> None:
    run = Run(max_model_len=10)
    add(run, "b", PROMPT, BeamSearchParams(2, 20))
    run.finish()
    assert [len(run.ends["b", i].token_ids) for i in range(2)] == [3, 3]
    assert [run.reason("b", i) for i in range(2)] == ["length"] * 2


def test_fork_trees() -> None:
    beams = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7]]
    assert common_length(beams) == 2
    assert common_length([[], []]) == 0
    assert split(beams, 2) == [[0, 1], [2]]
    # A prompt of 3 in blocks of 2. Beyond the common 5 tokens: 3 fills the common tail, 6 takes a
    # copy of it; then 4, 5 and 7 a block each.
    assert tree_blocks(beams, 3, 2) == 4
    assert tree_blocks(beams[:1], 3, 2) == 0


def test_fork_trees_are_counted_like_blocks_by_content() -> None:
    draw = np.random.default_rng(0)
    for _ in range(300):
        size, prompt, count = (int(draw.integers(1, n)) for n in (5, 9, 6))
        beams = [
            list(beam)
            for beam in sorted({tuple(draw.integers(0, 2, 7).tolist()) for _ in range(count)})
        ]
        texts = [(*range(-prompt, 0), *beam) for beam in beams]
        blocks = {t[:end] for t in texts for end in [*range(size, len(t), size), len(t)]}
        common = prompt + common_length(beams)
        assert -(-common // size) + tree_blocks(beams, prompt, size) == len(blocks)


# ---- in the engine

SHAPES = [(2, 1), (4, 3), (5, 4), (3, 16)]  # beam width, block size


@pytest.mark.parametrize(("width", "block_size"), SHAPES)
def test_beams_share_what_they_have_in_common(width: int, block_size: int) -> None:
    """After every step the pool holds the tree of the live beams and nothing else."""
    beam = BeamSearchParams(width, 14, length_penalty=1.5)
    run = Run(num_blocks=90, block_size=block_size, eos=EOS)
    add(run, "b", PROMPT, beam)
    forked = pruned = 0
    while run.core.has_unfinished():
        before = run.request("b")
        tails = [] if before is None else [branch.seq for branch in before.branches]
        run.step()
        assert run.manager.num_held_blocks == tree(run, "b")
        after = run.request("b")
        if after is not None and tails:
            seqs = [branch.seq for branch in after.branches]
            forked += len(set(seqs) - set(tails))
            pruned += len(set(tails) - set(seqs))
    assert forked > 0
    assert pruned > 0
    run.check_idle()
    assert found(run, "b", width) == alone(PROMPT, beam)


@pytest.mark.parametrize(("width", "block_size"), SHAPES)
def test_a_step_copies_partial_tails_only(width: int, block_size: int) -> None:
    """k beams of one parent cost k - 1 copies of its partial tail, and none of a full one."""
    beam = BeamSearchParams(width, 14)
    run = Run(num_blocks=90, block_size=block_size, eos=EOS)
    add(run, "b", PROMPT, beam)
    copied = 0
    while run.core.has_unfinished():
        request = run.request("b")
        tails = [
            int(run.manager.block_table(branch.seq)[-1])
            for branch in (request.branches if request else [])
            if branch.computed % block_size
        ]
        steps = len(run.steps)
        run.step()
        for step in run.steps[steps:]:
            assert len(step.copies) <= len(tails) - len(set(tails))
            copied += len(step.copies)
    assert (copied > 0) is (block_size > 1)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(("width", "block_size"), SHAPES)
def test_a_preemption_at_any_step_changes_nothing(
    width: int, block_size: int, prefix_caching: bool
) -> None:
    """Tokens, scores and reasons are the same bits; the toy model checks every entry read."""
    beam = BeamSearchParams(width, 9, length_penalty=0.5)
    want = alone(PROMPT, beam)
    for at in range(1, 12):
        run = Run(
            num_blocks=90,
            block_size=block_size,
            budget=7,
            eos=EOS,
            prefix_caching=prefix_caching,
        )
        add(run, "b", PROMPT, beam)
        run.add("other", PROMPT[:4], max_tokens=12)
        for _ in range(at):
            run.step()
        run.preempt("b")
        run.step()
        run.preempt("b")  # while it replays
        if prefix_caching and at % 2:
            run.manager.reset_cache()
        run.finish()
        assert found(run, "b", width) == want


@pytest.mark.parametrize(("width", "block_size"), [(4, 3), (5, 1), (3, 4)])
def test_a_resumed_group_takes_the_blocks_it_had(width: int, block_size: int) -> None:
    """It forks where the beams part: as many blocks as without the preemption, and no more."""
    beam = BeamSearchParams(width, 16)
    for at in range(2, 14, 3):
        runs = []
        for preempted in (False, True):
            run = Run(90, block_size, budget=64, eos=EOS, prefix_caching=False)
            add(run, "b", PROMPT, beam)
            for _ in range(at):
                run.step()
            if preempted:
                run.preempt("b")
                assert run.manager.num_held_blocks == 0
            runs.append(run)
        straight, resumed = runs
        request = resumed.request("b")
        assert request is not None
        needed = request.total_blocks(block_size)
        straight.step()
        assert straight.stats[-1].blocks_peak == needed
        straight.finish()
        resumed.step()
        while request.is_gathering or len(request.branches) == 1:
            assert resumed.manager.num_held_blocks == tree(resumed, "b") <= needed
            resumed.step()
        assert resumed.stats[-1].blocks_peak <= needed
        resumed.finish()
        assert found(resumed, "b", width) == alone(PROMPT, beam)


def test_many_groups_in_a_pool_too_small_for_them() -> None:
    beams = [BeamSearchParams(1 + i % 3, 6 + i, length_penalty=i / 3) for i in range(6)]
    prompts = [[(5 * i + 3 * j) % VOCAB for j in range(1 + 3 * i)] for i in range(6)]
    run = Run(num_blocks=22, block_size=2, budget=9, max_num_seqs=9, eos=EOS)
    for i, (prompt, beam) in enumerate(zip(prompts, beams, strict=True)):
        add(run, f"b{i}", prompt, beam)
        run.add(f"s{i}", prompt, seed=i, n=2, temperature=1.0, max_tokens=7)
    run.finish()
    assert run.scheduler.stats.num_preemptions > 0
    for i, (prompt, beam) in enumerate(zip(prompts, beams, strict=True)):
        assert found(run, f"b{i}", beam.beam_width) == alone(prompt, beam)


def test_a_lone_group_that_outgrows_the_pool_gives_its_best_finished_hypothesis() -> None:
    beam = BeamSearchParams(4, 60, length_penalty=3.0)
    run = Run(num_blocks=12, block_size=2, eos=tuple(range(10)))
    add(run, "b", PROMPT, beam)
    request = None
    while run.core.has_unfinished():
        request = run.request("b") or request
        run.step()
    run.check_idle()
    assert request is not None
    assert request.search is not None
    finished = [(h.tokens, h.score, "stop") for h in request.search.finished]
    got = found(run, "b", 4)
    assert 0 < len(finished) < 4
    assert got[: len(finished)] == finished
    assert [run.ends["b", i].error is None for i in range(4)] == [
        i < len(finished) for i in range(4)
    ]
    assert {reason for _, _, reason in got[len(finished) :]} == {"length"}
    assert "12 blocks of 2" in run.ends["b", 3].error


@pytest.mark.parametrize(("blocks", "prompt"), [(4, 7), (4, 8), (2, 1)])
def test_a_pool_that_the_prompt_fills(blocks: int, prompt: int) -> None:
    run = Run(num_blocks=blocks, block_size=2, eos=EOS)
    add(run, "b", PROMPT[:1] * prompt, BeamSearchParams(3, 20))
    run.finish()
    for i in range(3):
        assert run.ends["b", i].token_ids
        assert run.ends["b", i].finish_reason in ("stop", "length")


def test_nothing_is_reported_before_the_end() -> None:
    run = Run(eos=EOS)
    add(run, "b", PROMPT, BeamSearchParams(3, 6))
    run.finish()
    assert [(d.sample, d.finish_reason is not None) for d in run.deltas] == [
        (0, True),
        (1, True),
        (2, True),
    ]
    scores = [run.ends["b", i].score for i in range(3)]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("sample", [None, 1])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_beams_are_aborted_together(sample: int | None, steps: int) -> None:
    run = Run(eos=EOS)
    add(run, "b", PROMPT, BeamSearchParams(3, 40))
    for _ in range(steps):
        run.step()
    run.abort("b", sample)
    run.step()
    run.check_idle()
    assert [run.reason("b", i) for i in range(3)] == ["abort"] * 3


class Failing(ToyExecutor):
    """Reports an error in row 1 of the step that has so many rows, or gives too few tokens."""

    def __init__(self, change: Callable[[Step, Result], Result]) -> None:
        super().__init__(64, 4, VOCAB)
        self.change = change
        self.step: Step | None = None

    def submit(self, step: Step):
        self.step = step
        return super().submit(step)

    def collect(self, ticket):
        return self.change(self.step, super().collect(ticket))


def row_error(step: Step, result: Result) -> Result:
    if len(step.seqs) == 3:
        result.errors[1] = "no finite logits"
    return result


def too_few(step: Step, result: Result) -> Result:
    for entry in result.logprobs:
        object.__setattr__(entry, "ids", entry.ids[:3])
    return result


@pytest.mark.parametrize(
    ("change", "message"), [(row_error, "no finite logits"), (too_few, "scored 3 of 10")]
)
def test_an_error_ends_all_beams(change, message: str) -> None:
    run = Run(eos=EOS, executor=Failing(change), errors_ok=True)
    add(run, "b", PROMPT, BeamSearchParams(3, 20))
    run.finish()
    assert [run.reason("b", i) for i in range(3)] == ["error"] * 3
    assert message in run.ends["b", 0].error


def test_cached_prefixes_are_used_and_filled() -> None:
    beam = BeamSearchParams(3, 8)
    run = Run(eos=EOS)
    for name in ("cold", "warm"):
        add(run, name, PROMPT, beam)
        run.finish()
        assert found(run, name, 3) == alone(PROMPT, beam)
    assert run.cached("cold") == 0
    assert run.cached("warm") == len(PROMPT) - 1


# ---- refusals

VALID = {"beam_width": 2, "max_tokens": 8}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 0),
        ("beam_width", -1),
        ("beam_width", 257),
        ("beam_width", 2.0),
        ("beam_width", True),
        ("max_tokens", 0),
        ("max_tokens", None),
        ("length_penalty", float("nan")),
        ("length_penalty", 11),
        ("length_penalty", "1"),
        ("early_stopping", "never"),
        ("ignore_eos", 1),
        ("temperature", 0.7),
        ("temperature", float("nan")),
        ("temperature", False),
    ],
)
def test_bad_parameters(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"{name}="):
        BeamSearchParams(**{**VALID, name: value})


@pytest.mark.parametrize(
    ("beam", "params", "message"),
    [
        (BeamSearchParams(5, 4), None, "beam_width=5 is more than the 4 sequences"),
        (BeamSearchParams(2, 4), SamplingParams(n=2, temperature=0.5, max_tokens=4), "contradict"),
        (BeamSearchParams(2, 4), SamplingParams(n=2, temperature=0, max_tokens=9), "contradict"),
        (BeamSearchParams(33, 4, ignore_eos=True), None, "give at most 32"),
        (BeamSearchParams(22, 4), None, "give at most 21"),
        ({"beam_width": 2}, SamplingParams(), "must be BeamSearchParams"),
    ],
)
def test_refused_before_anything_is_allocated(beam, params, message: str) -> None:
    config = SchedulerConfig(4, 8, 100, EOS, vocab_size=1000)
    request = Add("b", (1, 2), params or beam.sampling, 0.0, 0, beam=beam)
    with pytest.raises(RequestError, match=message):
        validate_add(request, config, 100, 4)


def test_the_vocabulary_bounds_the_width() -> None:
    config = SchedulerConfig(8, 8, 100, EOS, vocab_size=10)
    beam = BeamSearchParams(4, 4)
    with pytest.raises(RequestError, match=r"needs the 12 best .* 10 can be had: give at most 3"):
        validate_add(Add("b", (1, 2), beam.sampling, 0.0, 0, beam=beam), config, 100, 4)
