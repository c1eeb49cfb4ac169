"""`choose` takes short cuts: its token is that of the filters applied to the whole vocabulary."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.engine.filters import choose
from pagedkv.scheduling.params import SamplingParams

V = 3000
ROWS = {
    "flat": np.zeros(V),
    "bell": np.random.default_rng(0).standard_normal(V) * 3,
    "peaked": np.random.default_rng(1).standard_normal(V) + 12 * (np.arange(V) == 77),
    "ties": np.random.default_rng(2).integers(-6, 6, V).astype(float),
    "slope": np.linspace(0, -40, V),
    "masked": np.where(np.arange(V) % 3, -np.inf, np.random.default_rng(3).standard_normal(V)),
}
FILTERS = (
    {},
    {"temperature": 0.3},
    {"temperature": 20.0},
    {"min_p": 0.01},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 2500},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"temperature": 1.5, "min_p": 1e-4, "top_k": 300, "top_p": 0.8},
)


def plain(scores: np.ndarray, params: SamplingParams, u: float) -> int:
    """The filters one after the other, each over all tokens that the one before has kept."""
    scaled = (scores.astype(np.float64) - scores.max()) / params.temperature
    ids = np.flatnonzero(scaled > -np.inf)
    if params.min_p > 0:
        ids = ids[scaled[ids] >= np.log(params.min_p)]
    if 0 < params.top_k < len(ids):
        ids = ids[scaled[ids] >= np.sort(scaled[ids])[-params.top_k]]
    weights = np.exp(scaled[ids])
    if params.top_p < 1:
        probs = weights / weights.sum()
        order = np.argsort(-probs, kind="stable")
        size = int(np.searchsorted(np.cumsum(probs[order]), params.top_p)) + 1
        keep = np.sort(order[:size])
        ids, weights = ids[keep], weights[keep]
    total = np.cumsum(weights)
    at = int(np.searchsorted(total, u * total[-1], side="right"))
    return int(ids[min(at, int(np.searchsorted(total, total[-1])))])


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_the_token_is_that_of_all_filters_over_all_tokens(
    row: str, filters: dict[str, float]
) -> None:
    scores, params = ROWS[row].astype(np.float32), SamplingParams(**filters)
    rng = np.random.default_rng(4)
    for u in (0.0, 0.5, 1 - 2**-53, *rng.random(60)):
        assert choose(scores, params, u) == plain(scores, params, u), u


def test_numbers_at_the_bound_between_two_tokens() -> None:
    """There a sum in another order may lie on the other side."""
    scores, params = ROWS["bell"].astype(np.float32), SamplingParams()
    total = np.cumsum(np.exp(scores.astype(np.float64) - scores.max()))
    for bound in (total / total[-1])[:-1:7]:
        for u in (np.nextafter(bound, 0), bound, np.nextafter(bound, 1)):
            assert choose(scores, params, float(u)) == plain(scores, params, float(u))


def test_float32_and_float64_scores_are_the_same() -> None:
    scores, params = ROWS["bell"].astype(np.float32), SamplingParams(top_p=0.9)
    for u in np.random.default_rng(5).random(50):
        assert choose(scores, params, u) == choose(scores.astype(np.float64), params, u)
