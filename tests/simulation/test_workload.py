"""Invented requests: the rates, the spread and the lengths that were asked for, from a seed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pagedkv.errors import ConfigError
from pagedkv.simulation.trace import Trace
from pagedkv.simulation.workload import (
    Arrivals,
    Bursts,
    Gamma,
    GeometricLengths,
    LengthTable,
    Poisson,
    invent,
    make_trace,
)

LENGTHS = GeometricLengths(100, 50)
KINDS = (Poisson(), Gamma(0.3), Gamma(3.0), Bursts(2.0, 6.0), Bursts(5.0, 0.0))


def gaps(trace: Trace) -> np.ndarray:
    assert trace.arrivals is not None
    return np.diff(trace.arrivals, prepend=0.0)


@pytest.mark.parametrize("arrivals", KINDS, ids=str)
def test_arrivals_ascend_at_the_rate(arrivals: Arrivals) -> None:
    found = gaps(invent(20_000, 4.0, arrivals, LENGTHS, seed=1))
    assert (found >= 0).all()
    assert found.mean() == pytest.approx(0.25, rel=0.1)


@pytest.mark.parametrize(
    ("arrivals", "cv"), [(Poisson(), 1.0), (Gamma(0.3), 0.3), (Gamma(1.0), 1.0), (Gamma(3.0), 3.0)]
)
def test_gaps_spread_as_asked(arrivals: Arrivals, cv: float) -> None:
    found = gaps(invent(50_000, 4.0, arrivals, LENGTHS, seed=2))
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.05)


def test_bursts_are_four_times_as_dense_and_pause() -> None:
    trace = invent(40_000, 5.0, Bursts(on=2.0, off=6.0), LENGTHS, seed=3)
    found = gaps(trace)
    # Inside a burst 20 a second; the gaps of a second and more are the pauses.
    assert np.median(found) == pytest.approx(np.log(2) / 20, rel=0.1)
    pauses = found[found > 1.0]
    assert len(pauses) == pytest.approx(40_000 / 40 * np.exp(-1 / 6), rel=0.1)


def test_bursts_without_pauses_are_poisson() -> None:
    found = gaps(invent(20_000, 5.0, Bursts(on=2.0, off=0.0), LENGTHS, seed=3))
    assert found.std() / found.mean() == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("arrivals", KINDS, ids=str)
def test_a_seed_fixes_everything(arrivals: Arrivals) -> None:
    first, again, other = (invent(50, 4.0, arrivals, LENGTHS, seed) for seed in (5, 5, 6))
    assert gaps(first).tolist() == gaps(again).tolist() != gaps(other).tolist()
    assert first.prompt_tokens.tolist() == again.prompt_tokens.tolist()
    # Lengths do not depend on arrivals.
    plain = invent(50, 9.0, Poisson(), LENGTHS, seed=5)
    assert first.prompt_tokens.tolist() == plain.prompt_tokens.tolist()
    assert first.output_tokens.tolist() == plain.output_tokens.tolist()


def test_tenants_have_their_rates() -> None:
    trace = invent(20_000, {"a": 1.5, "b": 3.0}, Poisson(), LENGTHS, seed=4)
    assert trace.tenants is not None
    counts = Counter(trace.tenants)
    assert counts["b"] / counts["a"] == pytest.approx(2.0, rel=0.05)
    found = gaps(trace)
    assert (found >= 0).all()
    assert found.mean() == pytest.approx(1 / 4.5, rel=0.05)


def test_a_tenant_is_independent_of_those_that_come_after() -> None:
    alone = invent(100, {"a": 1.5}, Poisson(), LENGTHS, seed=4)
    both = invent(400, {"a": 1.5, "b": 3.0}, Poisson(), LENGTHS, seed=4)
    assert alone.arrivals is not None and both.arrivals is not None and both.tenants is not None
    mine = [t for t, who in zip(both.arrivals.tolist(), both.tenants, strict=True) if who == "a"]
    assert mine[:50] == alone.arrivals.tolist()[:50]


def test_lengths_come_in_the_pairs_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n10,1\n20,2\n30,0\n")
    trace = invent(3000, 1.0, Poisson(), LengthTable.read(path))
    pairs = Counter(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True))
    assert set(pairs) == {(10, 1), (20, 2), (30, 0)}
    assert min(pairs.values()) > 800


def test_a_wrong_row_of_a_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n10,1\n-1,2\n")
    with pytest.raises(ConfigError, match="line 3: prompt_tokens='-1'"):
        LengthTable.read(path)


def test_speed_scales_arrivals_alone() -> None:
    trace = make_trace(20, 1.0, 10, 10)
    fast = trace.at_speed(4.0)
    assert trace.arrivals is not None and fast.arrivals is not None
    assert (fast.arrivals * 4.0).tolist() == pytest.approx(trace.arrivals.tolist())
    assert fast.prompt_tokens.tolist() == trace.prompt_tokens.tolist()


@pytest.mark.parametrize("speed", [0.0, -1.0, 1e-320, float("inf"), float("nan")])
def test_a_speed_that_cannot_be_is_refused(speed: float) -> None:
    with pytest.raises(ConfigError, match=f"speed={speed}"):
        make_trace(2, 1.0, 5, 5).at_speed(speed)


def test_no_speed_without_arrivals() -> None:
    trace = Trace(None, np.array([5]), np.array([1]), None, None, None)
    with pytest.raises(ConfigError, match="does not say when its requests arrive"):
        trace.at_speed(2.0)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ((1, 0.0, 5, 5), "rate=0"),
        ((1, 1e-320, 5, 5), "rate=1e-320"),
        ((10**18, 1.0, 5, 5), "num_requests=10+:"),
        ((1, 1.0, 10**30, 5), "prompt_tokens=10+:"),
        ((1, 1.0, 5, 0), "output_tokens=0"),
        ((1, 1.0, 5, 5, -1), "seed=-1"),
    ],
)
def test_requests_that_cannot_be_invented_are_refused(
    args: tuple[int, float, int, int], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        make_trace(*args)


@pytest.mark.parametrize("cv", [0.0, -1.0, 1e9, float("nan")])
def test_a_spread_that_cannot_be_is_refused(cv: float) -> None:
    with pytest.raises(ConfigError, match=f"cv={cv}"):
        Gamma(cv)


def test_bursts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"on=0\.0"):
        Bursts(0.0, 1.0)
    with pytest.raises(ConfigError, match=r"off=-1"):
        Bursts(1.0, -1.0)
    with pytest.raises(ConfigError, match="give longer ones"):
        invent(10**4, 1.0, Bursts(1e-6, 0.0), LENGTHS)


def test_rates_of_tenants_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rate=-1\.0 of tenant 'b'"):
        invent(5, {"a": 1.0, "b": -1.0}, Poisson(), LENGTHS)
    with pytest.raises(ConfigError, match="no tenant"):
        invent(5, {}, Poisson(), LENGTHS)
