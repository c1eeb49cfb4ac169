"""The sampler's filters and penalties, each against a plain reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pagedkv.engine.sampler import draw, draw_all, log_softmax, score_token, uniform
from pagedkv.errors import RequestError
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.step import Sample

V = 12


def sample(position: int = 0, key: int = 7, **kwargs: object) -> Sample:
    extra = {k: kwargs.pop(k) for k in ("forbidden", "prompt", "output") if k in kwargs}
    return Sample(0, SamplingParams(**kwargs), key, position, **extra)


def logits(seed: int = 0, size: int = V, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def reference_support(row: np.ndarray, params: SamplingParams) -> dict[int, float]:
    """The tokens that may be drawn and their probabilities, by plain Python over a list."""
    exps = [math.exp((float(x) - float(row.max())) / params.temperature) for x in row]
    kept = {i: e for i, e in enumerate(exps) if e >= params.min_p}
    if params.top_k > 0:
        best = sorted(kept, key=lambda i: -kept[i])[: params.top_k]
        kept = {i: kept[i] for i in best}
    if params.top_p < 1.0:
        total, reached, nucleus = sum(kept.values()), 0.0, {}
        for i in sorted(kept, key=lambda i: -kept[i]):
            nucleus[i] = kept[i]
            reached += kept[i] / total
            if reached >= params.top_p:
                break
        kept = nucleus
    total = sum(kept.values())
    return {i: e / total for i, e in kept.items()}


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 50},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(kwargs: dict[str, float]) -> None:
    row, draws = logits(), 3000
    expected = reference_support(row, SamplingParams(**kwargs))
    counts = dict.fromkeys(range(V), 0)
    for position in range(draws):
        counts[draw(row, sample(position, **kwargs)).token] += 1
    assert {i for i, c in counts.items() if c} <= set(expected)
    chi2 = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in expected.items())
    freedom = len(expected) - 1
    assert chi2 <= freedom + 4 * math.sqrt(2 * freedom) + 1e-9, f"chi2={chi2} counts={counts}"


def test_sample_i_of_seed_s_is_sample_0_of_seed_s_plus_i() -> None:
    row = logits()
    a = [draw(row, sample(p, key=100 + 3)).token for p in range(50)]
    b = [draw(row, sample(p, key=103 + 0)).token for p in range(50)]
    other = [draw(row, sample(p, key=104)).token for p in range(50)]
    assert a == b != other


@pytest.mark.parametrize("key", [0, -1, 2**63 - 1, -(2**63), 2**63 - 1 + 255])
def test_every_seed_gives_numbers_in_the_half_open_interval(key: int) -> None:
    values = [uniform(key, position) for position in range(100)]
    assert all(0.0 <= u < 1.0 for u in values)
    assert len(set(values)) == 100
    assert values == [uniform(key, position) for position in range(100)]


def test_result_of_a_row_is_independent_of_the_batch_and_its_order() -> None:
    table = torch.from_numpy(np.stack([logits(i, 300) for i in range(6)]))
    jobs = [
        sample(5, key=1),
        sample(5, key=2, top_p=0.7, logprobs=4),
        sample(9, key=3, top_k=20, min_p=0.01),
        sample(9, key=4, temperature=0, logprobs=2),
        sample(2, key=5, repetition_penalty=1.3, output=np.array([3, 4], np.int32)),
        sample(2, key=6, temperature=0),
    ]
    together = draw_all(table, range(6), jobs)
    backwards = draw_all(table, range(5, -1, -1), jobs[::-1])
    for i, job in enumerate(jobs):
        alone = draw_all(table[i : i + 1].clone(), [0], [job])
        for other, at in ((together, i), (backwards, 5 - i)):
            assert alone.tokens[0] == other.tokens[at]
            scored, again = alone.logprobs[0], other.logprobs[at]
            if job.params.logprobs is not None:
                assert scored is not None and again is not None
                assert scored.values.tobytes() == again.values.tobytes()


def test_several_samples_may_read_one_row() -> None:
    table = torch.from_numpy(np.stack([logits(0, 300), logits(1, 300)]))
    first, second = draw_all(table, [1, 1], [sample(4, key=8), sample(4, key=9)]).tokens
    assert first == draw(table[1].numpy(), sample(4, key=8)).token
    assert second == draw(table[1].numpy(), sample(4, key=9)).token


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_row_is_its_own_error(bad: float) -> None:
    good = logits(0)
    broken = np.full(V, -math.inf, np.float32) if bad == -math.inf else logits(1)
    broken[4] = bad
    table = torch.from_numpy(np.stack([good, broken]))
    greedy = sample(3, temperature=0)
    drawn = draw_all(table, [0, 1, 1], [sample(3), sample(3), greedy])
    assert drawn.tokens.tolist() == [draw(good, sample(3)).token]
    assert list(drawn.errors) == [1, 2] and all("finite" in why for why in drawn.errors.values())
    plain = draw_all(table, [1, 0], [greedy._replace(best=True)] * 2, plain=True)
    assert plain.tokens.tolist() == [good.argmax()] and list(plain.errors) == [0]


def test_everything_forbidden_is_the_rows_own_error() -> None:
    table = torch.from_numpy(np.stack([logits(0), logits(1)]))
    drawn = draw_all(table, [0, 1], [sample(forbidden=tuple(range(V)), temperature=0), sample()])
    assert list(drawn.errors) == [0] and "forbidden" in drawn.errors[0]
    assert drawn.tokens.tolist() == [draw(table[1].numpy(), sample()).token]


def test_masked_logits_are_never_drawn() -> None:
    row = logits()
    row[[2, 5]] = -math.inf
    assert not {draw(row, sample(p, temperature=5.0)).token for p in range(500)} & {2, 5}


def test_greedy_takes_the_first_of_the_largest() -> None:
    row = np.zeros(V, np.float32)
    row[[4, 9]] = 3.0
    greedy = sample(temperature=0)
    for job, plain in ((greedy, False), (greedy._replace(best=True), True)):
        drawn = draw_all(torch.from_numpy(row)[None], [0], [job], plain=plain)
        assert drawn.tokens.tolist() == [4]
    assert draw(row, sample(temperature=0, logprobs=1)).token == 4


def test_forbidden_tokens_and_logit_bias_change_the_choice() -> None:
    row = np.arange(V, dtype=np.float32)
    assert draw(row, sample(temperature=0, forbidden=(11, 10))).token == 9
    assert draw(row, sample(temperature=0, logit_bias={3: 50.0})).token == 3
    assert draw(row, sample(temperature=0, logit_bias={11: -100.0})).token == 10
    assert draw(row, sample(temperature=0, logit_bias={3: 50.0}, forbidden=(3,))).token == 11


def penalised(row: list[float], **kwargs: object) -> int:
    return draw(np.array(row, np.float32), sample(temperature=0, **kwargs)).token


def test_overflow_the_smallest_repetition_penalty_keeps_scores_finite() -> None:
    """A logit divided by 1e-320 is infinite."""
    with pytest.raises(RequestError, match="repetition_penalty=1e-320"):
        SamplingParams(repetition_penalty=1e-320)
    least = sample(repetition_penalty=0.01, output=np.array([0], np.int32))
    assert draw(np.array([np.finfo(np.float32).max, 1.0], np.float32), least).token == 0


def test_repetition_penalty_covers_prompt_and_output_and_both_signs() -> None:
    seen = np.array([0], np.int32)
    other = np.zeros(0, np.int32)
    # Positive logits are divided: 2.0 / 2 < 1.5. Negative ones are multiplied: -1 * 2 < -1.5.
    for prompt, output in ((seen, other), (other, seen)):
        positive = penalised([2.0, 1.5], repetition_penalty=2.0, prompt=prompt, output=output)
        negative = penalised([-1.0, -1.5], repetition_penalty=2.0, prompt=prompt, output=output)
        assert (positive, negative) == (1, 1)
    # Once however often it was seen: 3.0 / 2 = 1.5 > 1.4.
    often = np.array([0, 0, 0], np.int32)
    assert penalised([3.0, 1.4], repetition_penalty=2.0, prompt=often, output=often) == 0
    assert penalised([2.0, 2.5, 1.0], repetition_penalty=0.5, prompt=seen, output=other) == 0


def test_presence_penalty_counts_once_and_only_the_output() -> None:
    often = np.array([0, 0, 0, 0], np.int32)
    assert penalised([2.0, 1.1], presence_penalty=1.0, output=often) == 1
    assert penalised([2.2, 1.1], presence_penalty=1.0, output=often) == 0
    assert penalised([2.0, 1.1], presence_penalty=1.0, prompt=often) == 0
    assert penalised([1.0, 1.5], presence_penalty=-1.0, output=often) == 0


def test_frequency_penalty_counts_every_occurrence_and_only_the_output() -> None:
    thrice = np.array([0, 0, 0], np.int32)
    assert penalised([2.0, 0.6], frequency_penalty=0.5, output=thrice) == 1
    assert penalised([2.0, 0.4], frequency_penalty=0.5, output=thrice) == 0
    assert penalised([2.0, 0.6], frequency_penalty=0.5, prompt=thrice) == 0


def test_sampler_does_not_write_to_the_logits() -> None:
    row = logits()
    before = row.tobytes()
    draw(
        row,
        sample(
            logit_bias={1: 5.0},
            forbidden=(2,),
            repetition_penalty=2.0,
            prompt=np.array([1, 3], np.int32),
            top_k=3,
            logprobs=3,
        ),
    )
    assert row.tobytes() == before


def test_logprobs_are_the_models_own_and_carry_alternatives_and_rank() -> None:
    row = logits()
    expected = torch.log_softmax(torch.from_numpy(row).double(), -1)
    order = torch.argsort(expected, descending=True).tolist()
    result = draw(row, sample(temperature=0, forbidden=(order[0],), logprobs=3, top_k=1))
    assert result.token == order[1] and result.logprobs is not None
    assert result.logprobs.ids.tolist() == [order[1], *order[:3]]
    assert result.logprobs.rank == 2
    np.testing.assert_allclose(result.logprobs.values, expected[result.logprobs.ids], atol=1e-6)
    only = draw(row, sample(temperature=0, logprobs=0)).logprobs
    assert only is not None and only.ids.tolist() == [order[0]] and only.rank == 1


def test_equal_alternatives_are_ordered_by_id() -> None:
    row = np.zeros(V, np.float32)
    scored = score_token(log_softmax(row), 5, 3)
    assert scored.ids.tolist() == [5, 0, 1, 2] and scored.rank == 1
    assert len(score_token(log_softmax(row), 5, 64).ids) == V + 1


def test_a_temperature_next_to_nothing_is_greedy_without_a_warning() -> None:
    logits = np.array([1.0, 3.0, 2.0], np.float32)
    with np.errstate(all="raise", under="ignore"):
        drawn = draw(logits, Sample(0, SamplingParams(temperature=1e-320), 7, 0))
    assert drawn.token == 1
