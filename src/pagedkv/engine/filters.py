"""From the scores of one row to the token that is drawn: temperature, min_p, top_k, top_p.

Most of a vocabulary is far behind the best token. What the filters keep is looked for near the best
one first, and among all tokens only where that does not suffice: the same tokens with less work.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.step import Float32

Float64 = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]

# Scaled scores above which the k best are looked for first.
_NEAR = -8.0
# Probabilities from which on the nucleus is looked for first.
_LIKELY = (2.0**-10, 2.0**-15)
# Weights that are added up at a time.
_BLOCK = 256
# Bound of the relative error of a sum, for each term of it: that of float64 with room to spare.
_ROUNDING = 2.0**-50


def choose(scores: Float32 | Float64, params: SamplingParams, u: float) -> int:
    """The token at u in [0, 1) of the filtered distribution; temperature > 0.

    scores: [V], not changed; -inf for what may not be drawn, the largest is finite. The filters are
    applied in the order min_p, top_k, top_p; equals of the k-th best stay too.
    """
    with np.errstate(over="ignore"):  # what is infinitely far behind has no weight
        scaled = np.subtract(scores, scores.max(), dtype=np.float64)
        scaled /= params.temperature  # <= 0, so exp cannot overflow
    least = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    ids = None  # all of them
    if params.min_p > 0.0 or scores.min() == -math.inf:
        ids = np.flatnonzero((scaled >= least) & (scaled > -math.inf))
        scaled = scaled[ids]
    if 0 < params.top_k < len(scaled):
        ids, scaled = _take(ids, scaled, _best(scaled, params.top_k))
    weights = np.exp(scaled)
    if params.top_p < 1.0:
        ids, weights = _take(ids, weights, _nucleus(weights, params.top_p))
    place = _pick(weights, u)
    return place if ids is None else int(ids[place])


def _take(ids: Ids | None, values: Float64, places: Ids) -> tuple[Ids, Float64]:
    return places if ids is None else ids[places], values[places]


def _best(scaled: Float64, k: int) -> Ids:
    """Indices, ascending, of the k best and of equals of the last of them."""
    near = np.flatnonzero(scaled > _NEAR)
    if len(near) < k:
        near = np.arange(len(scaled))
    kth = len(near) - k
    keep: Ids = near[scaled[near] >= np.partition(scaled[near], kth)[kth]]
    return keep


def _nucleus(weights: Float64, top_p: float) -> Ids:
    """Indices, ascending, of the fewest most likely tokens whose probabilities reach top_p."""
    total = weights.sum()
    # All tokens below (1 - p) / n together weigh less than 1 - p, so none of them is in the
    # nucleus; what is left is short enough to sort.
    for floor in (*_LIKELY, (1.0 - top_p) / len(weights)):
        likely = np.flatnonzero(weights >= floor * total)
        probs = weights[likely] / total
        order = np.argsort(-probs, kind="stable")
        reached = np.cumsum(probs[order])
        if len(reached) and reached[-1] >= top_p:
            break
    size = int(np.searchsorted(reached, top_p)) + 1
    return np.sort(likely[order[:size]])


def _pick(weights: Float64, u: float) -> int:
    """Index at u in [0, 1) of the cumulative distribution, as summed up from the left.

    Sums of blocks lead to the block, and almost always to the index: rounding is not the same, but
    few numbers are so close to a bound between two tokens that it matters.
    """
    starts = np.arange(0, len(weights), _BLOCK)
    bounds = np.cumsum(np.add.reduceat(weights, starts))
    goal, slack = u * bounds[-1], bounds[-1] * len(weights) * _ROUNDING
    block = min(int(np.searchsorted(bounds, goal, side="right")), len(starts) - 1)
    before, first = bounds[block - 1] if block else 0.0, block * _BLOCK
    inside = before + np.cumsum(weights[first : first + _BLOCK])
    low, high = np.searchsorted(inside, (goal - slack, goal + slack), side="right").tolist()
    if low == high < len(inside) and before <= goal - slack:
        return first + int(low)
    total = np.cumsum(weights)
    at = int(np.searchsorted(total, u * total[-1], side="right"))
    # u * total may round up to total; the answer is then the last token that has any weight.
    return min(at, int(np.searchsorted(total, total[-1])))
