"""Recursive least squares with coefficients that are never negative."""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

# Weight that an observation keeps with each later one: some 200 of them count.
FORGETTING = 0.995
# Observations until predictions serve as the measure of further ones.
MIN_OBSERVATIONS = 16
# Times its prediction from which on an observation is taken for a hiccup and weighs less.
HICCUP = 5.0
# Pull towards the coefficients so far, as a share of what the weighted observations say.
RIDGE = 1e-6
# Keeps the scale of a feature that was last seen long ago above zero.
TINY = 1e-150


class NonNegativeFit:
    """y ~ coefficients @ x, refitted with each observation; x >= 0, y > 0.

    The exponentially weighted normal equations are kept and solved (the information form of
    recursive least squares, so no covariance can grow without bound). Errors are relative: an
    observation weighs 1 / prediction**2, and a hiccup, which is HICCUP times its prediction or
    more, counts no more than one of HICCUP times. Features are scaled to the same size before the
    equations are solved. Where observations say nothing (a feature not seen for long, or one that
    moves with another) the coefficients stay what they were. Deterministic.
    """

    def __init__(self, num_features: int) -> None:
        self.num_observed = 0
        self.coefficients: Float64 = np.zeros(num_features)
        self._information = np.zeros((num_features, num_features))
        self._target = np.zeros(num_features)
        self._ridge = RIDGE * np.eye(num_features)
        # Every choice of features but none at all, bool [2**k - 1, k].
        self._choices = np.array(list(product((False, True), repeat=num_features))[1:])

    def predict(self, x: Float64) -> float:
        return float(self.coefficients @ x)

    def observe(self, x: Float64, y: float) -> None:
        """x float64 [k], finite; y finite and > 0. O(k**3)."""
        unit = y
        if self.num_observed >= MIN_OBSERVATIONS:
            unit = max(self.predict(x), y / HICCUP)
        x = x / unit
        self._information = FORGETTING * self._information + x[:, None] * x
        self._target = FORGETTING * self._target + x * (y / unit)
        self.num_observed += 1
        self._solve()

    def _solve(self) -> None:
        scale = np.sqrt(np.maximum(self._information.diagonal(), TINY))
        matrix = self._information / (scale[:, None] * scale) + self._ridge
        target = self._target / scale + RIDGE * self.coefficients * scale
        best = np.linalg.solve(matrix, target)
        if (best < 0).any():
            best = self._best_choice(matrix, target)
        self.coefficients = best / scale

    def _best_choice(self, matrix: Float64, target: Float64) -> Float64:
        """The non-negative minimiser of z @ matrix @ z / 2 - target @ z.

        It is the unconstrained one over some choice of features; there are few, so all are tried.
        """
        chosen = self._choices
        both = chosen[:, :, None] & chosen[:, None, :]
        matrices = np.where(both, matrix, np.eye(len(target)))
        targets = np.where(chosen, target, 0.0)
        found = np.linalg.solve(matrices, targets[:, :, None])[:, :, 0]
        gain = np.where((found >= 0).all(axis=1), (found * target).sum(axis=1), -np.inf)
        best: Float64 = found[int(gain.argmax())]
        return best
