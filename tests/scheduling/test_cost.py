"""What steps and copies take: features, predictions, and the chunk that a target allows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.scheduling.cost import PREFILL_FLOOR, TILE, CostModel, LinkModel, StepFeatures
from pagedkv.scheduling.step import Step

BASE, TOKEN, CONTEXT, PAIR = 4e-3, 3e-5, 2e-8, 1e-9


def make_step(query_lens: list[int], context_lens: list[int]) -> Step:
    n, total = len(query_lens), sum(query_lens)
    zeros = np.zeros(total, np.int32)
    return Step(
        index=0,
        seqs=np.arange(n, dtype=np.int64),
        table_rows=np.arange(n, dtype=np.int32),
        query_lens=np.array(query_lens, np.int32),
        context_lens=np.array(context_lens, np.int32),
        tokens=zeros,
        positions=zeros,
        slots=zeros.astype(np.int64),
        copies=np.zeros((0, 3), np.int32),
        changed_rows=np.zeros(0, np.int32),
        changed_tables=np.zeros((0, 0), np.int32),
    )


def seconds(features: StepFeatures) -> float:
    tokens, context, pairs = features
    return BASE + TOKEN * tokens + CONTEXT * context + PAIR * pairs


def fitted() -> CostModel:
    model, rng = CostModel(), np.random.default_rng(0)
    for _ in range(200):
        decodes, chunk = int(rng.integers(1, 64)), int(rng.integers(0, 512))
        pairs = chunk * (int(rng.integers(0, 4000)) + chunk / 2)
        features = StepFeatures(decodes + chunk, int(rng.integers(100, 9000)) * decodes, pairs)
        model.observe(features, seconds(features))
    return model


def test_features_of_a_step_of_decodes_and_chunks() -> None:
    """Two decodes of 10 and 20 tokens; 4 tokens from the start, and 8 after 100."""
    features = StepFeatures.of(make_step([1, 4, 8, 1], [10, 4, 108, 20]))
    assert features == (14, 30, 4 * (0 + 2) + 8 * (100 + 4))


def test_features_of_decodes_alone() -> None:
    assert StepFeatures.of(make_step([1, 1, 1], [10, 7, 2**31 - 1])) == (3, 2**31 + 16, 0.0)


def test_features_of_long_rows_do_not_overflow() -> None:
    features = StepFeatures.of(make_step([2**20], [2**30]))
    assert features.sum_pairs == 2**20 * (2**30 - 2**19)


def test_predictions_are_those_of_the_machine() -> None:
    model = fitted()
    assert model.fitted and model.error < 0.01
    assert model.predict(40, 30_000, 5000) == pytest.approx(
        BASE + 40 * TOKEN + 30_000 * CONTEXT + 5000 * PAIR, rel=0.01
    )
    chunk = 300 * TOKEN + 300 * (1000 + 150) * PAIR
    assert model.prefill_seconds(300, 1000) == pytest.approx(chunk, rel=0.01)
    assert model.recompute_seconds(300, 1000) == model.prefill_seconds(300, 1000)
    assert model.prefill_seconds(300, 1000, alone=True) == pytest.approx(BASE + chunk, rel=0.01)


def test_it_does_not_matter_when_it_is_asked() -> None:
    """Observations are taken in some at a time, or when somebody asks."""
    rng = np.random.default_rng(0)
    asked, left_alone = CostModel(), CostModel()
    for _ in range(100):
        step = StepFeatures(int(rng.integers(1, 500)), int(rng.integers(5000)), 0.0)
        took = seconds(step) * rng.uniform(0.8, 1.2)
        asked.observe(step, took)
        left_alone.observe(step, took)
        assert asked.predict(*step) > 0
    assert left_alone.error == asked.error > 0
    assert left_alone.fitted and left_alone.describe() == asked.describe()


def test_one_step_of_a_nanosecond_does_not_make_the_model_worthless() -> None:
    model, features = fitted(), StepFeatures(4, 0, 8.0)
    model.observe(features, 1e-9)
    assert model.error < 0.1


def test_durations_that_cannot_be_are_ignored_and_counted() -> None:
    model, features = CostModel(), StepFeatures(4, 0, 8.0)
    for wrong in (0.0, -1.0, 5e-324, math.nan, math.inf, 1e9, None):
        model.observe(features, wrong)
        model.link_out.observe(4096, 1, wrong)
    model.link_out.observe(0, 0, 1.0)
    assert (model.num_observed, model.num_ignored) == (0, 7)
    assert (model.link_out.fitted, model.link_out.num_ignored) == (False, 8)
    assert model.predict(10, 10, 10) == 0.0
    assert str(model) == "not fitted: 0 steps measured, 7 ignored"


def test_steps_of_one_size_do_not_make_a_fitted_model() -> None:
    """What a token costs cannot be told from what a step costs."""
    model = CostModel()
    for _ in range(100):
        model.observe(StepFeatures(4, 400, 0), 0.01)
    assert model.num_observed == 100 and not model.fitted
    assert model.max_prefill(0.001, limit=512) == 512
    model.observe(StepFeatures(8, 400, 32), 0.02)
    assert model.fitted


@settings(max_examples=200, deadline=None)
@given(
    target=st.floats(0, 0.2),
    limit=st.integers(1, 4096),
    decodes=st.integers(0, 256),
    mean=st.integers(1, 8000),
    prior=st.integers(0, 100_000),
    floor=st.sampled_from([1, PREFILL_FLOOR]),
)
def test_the_largest_prefill_is_found_as_by_trying_all(
    target: float, limit: int, decodes: int, mean: int, prior: int, floor: int
) -> None:
    model = MODEL
    context = decodes * mean

    def takes(chunk: int) -> float:
        return model.predict(decodes + chunk, context, chunk * (prior + chunk / 2))

    found = model.max_prefill(target, limit, decodes, context, prior, floor)
    if takes(limit) <= target * (1 - 1e-9):
        assert found == limit
        return
    if takes(limit) <= target * (1 + 1e-9):
        return  # a tie of rounding
    tiles = [n for n in range(0, limit, TILE) if takes(n) <= target]
    expected = min(limit, max(floor, max(tiles, default=0)))
    near = any(abs(takes(n) - target) <= 1e-9 * target for n in range(0, limit, TILE))
    assert found == expected or near


MODEL = fitted()


def test_a_target_without_bound_allows_everything() -> None:
    assert MODEL.max_prefill(math.inf, limit=10**9) == 10**9


def test_a_link_of_pieces_and_bytes() -> None:
    link, rng = LinkModel(), np.random.default_rng(1)
    assert not link.fitted and link.seconds(10, 1) == 0.0
    for _ in range(100):
        pieces, size = int(rng.integers(1, 50)), int(rng.integers(1000, 2_000_000))
        link.observe(pieces * size, pieces, pieces * 5e-6 + pieces * size / 50e9)
    numbers = link.describe()
    assert numbers["seconds_per_piece"] == pytest.approx(5e-6, rel=0.01)
    assert 1 / numbers["seconds_per_byte"] == pytest.approx(50e9, rel=0.01)


def test_swapping_takes_both_ways_as_far_as_they_are_left_to_do() -> None:
    model = CostModel()
    for pieces in (1, 2, 3, 10):
        model.link_out.observe(pieces * 4096, pieces, pieces * 1e-4)
        model.link_in.observe(pieces * 4096, pieces, pieces * 3e-4)
    assert model.swap_seconds(8192, 2, 40_960, 10) == pytest.approx(2e-4 + 30e-4, rel=1e-3)
    assert model.swap_seconds(0, 0, 40_960, 10) == pytest.approx(30e-4, rel=1e-3)


def test_the_numbers_are_there_as_a_dict_and_as_a_line() -> None:
    model = fitted()
    model.link_in.observe(4096, 1, 1e-4)
    numbers = model.describe()
    assert numbers["fitted"] == 1.0 and numbers["observations"] == 200
    assert numbers["seconds_per_step"] == pytest.approx(BASE, rel=0.01)
    assert numbers["seconds_per_pair"] == pytest.approx(PAIR, rel=0.01)
    assert numbers["link_in_observations"] == 1 and numbers["link_out_observations"] == 0
    line = str(model)
    assert line.startswith("4 ms a step + 30 us a token + 20 ns a context token + 1 ns a pair")
    assert "200 steps" in line and "copy in" in line and "copy out" not in line
