"""The fit finds what made the observations, forgets, and survives what is not in the book."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.scheduling.fit import FORGETTING, NonNegativeFit

TRUE = np.array([4e-3, 3e-5, 2e-8, 1e-9])


def workload(rng: np.random.Generator, decodes_only: bool = False) -> np.ndarray:
    decodes = int(rng.integers(1, 64))
    chunk = 0 if decodes_only or rng.random() < 0.5 else int(rng.integers(2, 512))
    pairs = chunk * (int(rng.integers(0, 4000)) + chunk / 2)
    return np.array([1.0, decodes + chunk, decodes * int(rng.integers(100, 3000)), pairs])


def fed(count: int, seed: int = 0, noise: float = 0.0, true: np.ndarray = TRUE) -> NonNegativeFit:
    rng, fit = np.random.default_rng(seed), NonNegativeFit(4)
    for _ in range(count):
        x = workload(rng)
        fit.observe(x, float(true @ x) * (1 + noise * rng.uniform(-1, 1)))
    return fit


def test_coefficients_of_exact_observations_are_found() -> None:
    assert fed(60).coefficients == pytest.approx(TRUE, rel=1e-3)


def test_noise_averages_out() -> None:
    fit, rng = fed(2000, noise=0.3), np.random.default_rng(1)
    for _ in range(50):
        x = workload(rng)
        assert fit.predict(x) == pytest.approx(float(TRUE @ x), rel=0.1)


def test_a_machine_that_becomes_three_times_slower_is_noticed() -> None:
    fit, rng = fed(500), np.random.default_rng(2)
    for _ in range(1500):
        x = workload(rng)
        fit.observe(x, 3 * float(TRUE @ x))
    assert fit.coefficients == pytest.approx(3 * TRUE, rel=0.01)


def test_what_is_not_seen_for_long_keeps_its_coefficient() -> None:
    """100,000 steps without a chunk: the weight of the last chunk is below 1e-200 by then."""
    fit, rng = fed(500), np.random.default_rng(3)
    for _ in range(100_000):
        x = workload(rng, decodes_only=True)
        fit.observe(x, float(TRUE @ x))
    assert fit.coefficients == pytest.approx(TRUE, rel=0.01)


def test_features_that_move_together_stay_where_they_were() -> None:
    """A constant batch says nothing of what is paid a step and what a token."""
    fit = fed(500)
    x = np.array([1.0, 32, 32_000, 0.0])
    for _ in range(20_000):
        fit.observe(x, float(TRUE @ x))
    assert fit.coefficients == pytest.approx(TRUE, rel=0.01)


def test_one_hiccup_does_not_carry_the_fit_away() -> None:
    """A step of 1000 times its duration weighs no more than one of 5 times."""
    fit = fed(300)
    x = np.array([1.0, 32, 32_000, 0.0])
    before = fit.predict(x)
    fit.observe(x, 1000 * before)
    assert fit.predict(x) < 1.2 * before


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.floats(0, 1e6), st.floats(0, 1e9), st.floats(0, 1e12), st.floats(1e-9, 3600)),
        min_size=1,
        max_size=40,
    )
)
def test_any_observations_leave_finite_coefficients_of_at_least_0(
    rows: list[tuple[float, float, float, float]],
) -> None:
    fit = NonNegativeFit(4)
    for *features, y in rows:
        fit.observe(np.array([1.0, *features]), y)
        assert np.isfinite(fit.coefficients).all() and (fit.coefficients >= 0).all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_best_coefficients_of_at_least_0_are_chosen(seed: int) -> None:
    """Against a search of a grid around the answer: no neighbour is better."""
    rng = np.random.default_rng(seed)
    half = rng.normal(size=(4, 4))
    matrix, target = half @ half.T + 0.1 * np.eye(4), rng.normal(size=4)
    target[0] = abs(target[0])
    best = NonNegativeFit(4)._best_choice(matrix, target)
    loss = best @ matrix @ best / 2 - target @ best
    for move in itertools.product((-0.01, 0.0, 0.01), repeat=4):
        other = np.maximum(best + np.array(move), 0.0)
        assert other @ matrix @ other / 2 - target @ other >= loss - 1e-12


def test_the_weighted_equations_are_those_of_all_observations_at_once() -> None:
    """Before predictions serve as units: sum over i of weight**(n - i) * (x_i / y_i)."""
    rng = np.random.default_rng(5)
    rows = [workload(rng) for _ in range(10)]
    fit = NonNegativeFit(4)
    for x in rows:
        fit.observe(x, float(TRUE @ x))
    weights = FORGETTING ** np.arange(len(rows) - 1, -1, -1)
    scaled = np.array([x / float(TRUE @ x) for x in rows])
    assert fit._information == pytest.approx((scaled * weights[:, None]).T @ scaled)
    assert fit._target == pytest.approx(scaled.T @ weights)


def test_the_same_observations_give_the_same_bits() -> None:
    assert (fed(300, noise=0.2).coefficients == fed(300, noise=0.2).coefficients).all()
