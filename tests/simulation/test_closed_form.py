"""Rates by formulas: against formulas of textbooks, and against what is published."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

from pagedkv.errors import ConfigError
from pagedkv.simulation.closed_form import ClosedForm, Device
from pagedkv.simulation.executor import LinearCost
from pagedkv.simulation.objective import Objective
from pagedkv.simulation.perf_tables import read_cost
from pagedkv.simulation.split import best_split
from pagedkv.simulation.trace import Trace, read_trace

PLAIN = LinearCost(0.02, 1e-4)


def equal(prompt: int, output: int, n: int = 10) -> Trace:
    return Trace(None, np.full(n, prompt), np.full(n, output), None, None, None)


def form(trace: Trace, ttft: float, tpot: float, share: float = 0.9, **device: float) -> ClosedForm:
    pool = int(device.pop("pool_tokens", 10**6))
    return ClosedForm(trace, Device(PLAIN, pool, **device), Objective(ttft, tpot, share))


def test_equal_prompts_wait_as_in_an_md1_queue():
    """At the rate that is found the share of late ones is load * exp(-load * slack / mean wait)."""
    seconds = 0.02 + 500 * 1e-4
    rate = form(equal(500, 2), ttft=0.3, tpot=1.0).prefill_rate()
    load = rate * seconds
    wait = load * seconds / (2 * (1 - load))
    assert load * math.exp(-load * (0.3 - seconds) / wait) == pytest.approx(0.1, rel=1e-6)


def test_long_prompts_that_are_late_anyway_count_as_late():
    mixed = Trace(None, np.array([100] * 9 + [9000]), np.full(10, 2), None, None, None)
    assert form(mixed, ttft=0.5, tpot=1.0, share=0.85).prefill_rate() > 0
    assert form(mixed, ttft=0.5, tpot=1.0, share=0.95).prefill_rate() == 0.0


def test_decodes_are_bounded_by_the_time_of_a_step():
    """100 decodes take 0.03 s; the mean number is below that by what a Poisson number varies."""
    rate = form(equal(10, 101), ttft=1.0, tpot=0.03001).decode_rate()
    batch = rate * 100 * (0.02 + 1e-4 * 88)
    assert batch == pytest.approx(88, abs=0.1)
    assert batch + 1.2816 * math.sqrt(batch) == pytest.approx(100, abs=0.1)


def test_and_by_the_pool_and_the_seats():
    free = form(equal(1000, 101), ttft=1.0, tpot=1.0).decode_rate()
    pool = form(equal(1000, 101), ttft=1.0, tpot=1.0, pool_tokens=21_100).decode_rate()
    seats = form(equal(1000, 101), ttft=1.0, tpot=1.0, max_num_seqs=20).decode_rate()
    assert pool == pytest.approx(seats)
    assert pool < free / 3


def test_a_link_bounds_both_sides():
    rates = form(equal(500, 100), ttft=1.0, tpot=1.0, transfer=1e-3).rates()
    assert rates.prefill == rates.decode == pytest.approx(2.0)
    assert rates.colocated > 2.0


def test_tighter_targets_never_raise_a_rate():
    trace = equal(800, 200)
    for name in ("prefill_rate", "decode_rate", "colocated"):
        found = [
            getattr(form(trace, ttft, tpot), name)()
            for ttft, tpot in ((2.0, 0.2), (1.0, 0.1), (0.5, 0.05), (0.2, 0.03), (0.05, 0.01))
        ]
        rates = [getattr(rate, "rate", rate) for rate in found]
        assert rates == sorted(rates, reverse=True)
        assert rates[-1] == 0.0


def test_answers_of_one_token_are_prefill_alone():
    only = form(equal(500, 1), ttft=0.3, tpot=1.0)
    assert only.decode_rate() == math.inf
    assert only.colocated().rate == pytest.approx(only.prefill_rate())


def test_what_cannot_be():
    with pytest.raises(ConfigError, match="pool_tokens=0"):
        Device(PLAIN, 0)
    with pytest.raises(ConfigError, match="transfer=-1"):
        Device(PLAIN, 1, transfer=-1.0)
    for bad in ({"ttft": 0.0}, {"tpot": math.inf}, {"share": 1.0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            Objective(**({"ttft": 1.0, "tpot": 1.0, "share": 0.9} | bad))


TRACES = os.environ.get("PAGEDKV_TRACES")


@pytest.mark.skipif(TRACES is None, reason="no traces: set PAGEDKV_TRACES")
@pytest.mark.parametrize(("model", "pool"), [("llama2-70b", 1_300_000), ("bloom-176b", 60_000)])
def test_the_direction_of_splitwise(model, pool):
    """Conversations on A100s: a split pays under tight targets, and not where throughput counts.

    Splitwise (Patel et al., ISCA 2024) and DistServe report the one, DistServe says the other.
    """
    trace = read_trace(Path(str(TRACES)) / "azure2023_conv.csv")
    cost = read_cost(Path(str(TRACES)) / "perf_splitwise.csv", model, "a100-80gb", 8)
    gains = []
    for objective in (Objective(1.0, 0.06), Objective(2.0, 0.2)):
        rates = ClosedForm(trace, Device(cost, pool, transfer=1e-5), objective).rates()
        gains.append(best_split(rates, 8).goodput / rates.colocated)
    assert gains[0] > 1.3
    assert gains[1] < 1.0
