"""When requests are due, and whose they are: pure functions of a seed."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.errors import ConfigError
from pagedkv.loadtest.datasets import Question
from pagedkv.loadtest.requests import Goals, SloClass, Tenant, assign, due_times, make_requests
from pagedkv.simulation.workload import Bursts, Gamma, Poisson


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("arrivals", [Poisson(), Gamma(3.0), Bursts(1.0, 2.0)])
def test_due_times_keep_the_rate_and_follow_from_the_seed(arrivals: Poisson) -> None:
    times = due_times(20_000, 8.0, arrivals, rng())
    assert (np.diff(times) >= 0).all()
    assert 20_000 / times[-1] == pytest.approx(8.0, rel=0.1)
    assert (times == due_times(20_000, 8.0, arrivals, rng())).all()
    assert (times != due_times(20_000, 8.0, arrivals, rng(1))).any()


def test_burstiness_is_the_shape_of_the_gaps() -> None:
    gaps = np.diff(due_times(50_000, 1.0, Gamma(0.25**-0.5), rng()))
    assert gaps.var() == pytest.approx(1 / 0.25, rel=0.1)  # mean 1: variance 1 / shape


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert due_times(3, float("inf"), Poisson(), rng()).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), -float("inf")])
def test_a_rate_is_above_zero(rate: float) -> None:
    with pytest.raises(ConfigError, match="request_rate="):
        due_times(3, rate, Poisson(), rng())


def test_shares_are_kept_exactly_and_spread_at_random() -> None:
    places = assign(100, [3.0, 1.0], rng())
    assert places.count(0) == 75
    assert places != sorted(places)
    with pytest.raises(ConfigError, match="share=0"):
        assign(4, [1.0, 0.0], rng())


def test_tenants_and_classes_are_independent_of_each_other() -> None:
    tenants = [Tenant("a", "ka"), Tenant("b", "kb")]
    classes = [SloClass("fast", Goals(0.2)), SloClass("slow", Goals(2.0))]
    requests = make_requests(
        [Question("p", 1)] * 400, np.arange(400.0), tenants, classes, np.random.default_rng(0)
    )
    pairs = [(r.tenant.name, r.slo_class.name) for r in requests if r.tenant and r.slo_class]
    assert {pair: pairs.count(pair) > 60 for pair in set(pairs)} == {
        (t, c): True for t in ("a", "b") for c in ("fast", "slow")
    }
    assert [r.due for r in requests] == list(range(400))


def test_a_question_of_a_named_tenant_is_his() -> None:
    questions = [Question("p", 1, "b"), Question("p", 1, "a"), Question("p", 1, "b")]
    tenants = [Tenant("a", "ka"), Tenant("b", "kb")]
    requests = make_requests(questions, np.zeros(3), tenants, [], rng())
    assert [r.tenant.key for r in requests if r.tenant] == ["kb", "ka", "kb"]
    with pytest.raises(ConfigError, match="--tenant b=KEY"):
        make_requests(questions, np.zeros(3), tenants[:1], [], rng())
    assert make_requests(questions, np.zeros(3), [], [], rng())[0].tenant is None
