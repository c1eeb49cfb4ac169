"""More requests are on time by deadline than first come, first served, and nobody starves."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.simulation.executor import LinearCost
from pagedkv.simulation.goodput import (
    Target,
    TargetedRequest,
    TargetedRun,
    choose_targets,
    left_out_in_hindsight,
    serve_targets,
)

MIX = (Target(0.4, 1.0, 0.1), Target(0.4, 5.0, 0.2), Target(0.2, 30.0, 0.4))
COST = LinearCost(0.03, 2e-4, 1e-6)
FULL = 4.1  # requests/s of the saturated server: see test_the_server_saturates_where_it_is_said_to
SECONDS = 40


def made_up(load: float) -> list[TargetedRequest]:
    """Evenly spread points, no generator: arrivals of a doubling and halving rate."""
    n = int(load * FULL * SECONDS)
    even = np.arange(n)
    arrivals = (even + 0.8 * n / (8 * np.pi) * np.sin(8 * np.pi * even / n)) * SECONDS / n
    prompts = np.exp(4.6 + 3.0 * (even * 0.7548776662466927 % 1.0)).astype(int).tolist()
    outputs = np.exp(2.5 + 1.5 * (even * 0.5698402909980532 % 1.0)).astype(int).tolist()
    rows = zip(arrivals.tolist(), prompts, outputs, choose_targets(n, MIX), strict=True)
    return [TargetedRequest(*row, tenant=str(i % 3)) for i, row in enumerate(rows)]


@lru_cache
def run(policy: str, load: float, overload: str = "reject", knows: bool = False) -> TargetedRun:
    config = SchedulerConfig(
        64, 256, 4096, policy=policy, max_num_waiting=24, decision_log=0, overload=overload
    )
    return serve_targets(made_up(load), config, 1_000, COST, knows_lengths=knows)


def test_the_server_saturates_where_it_is_said_to():
    todo = [replace(r, arrival=0.0, target=Target(1.0, 1e8, 1e5)) for r in made_up(1.0)]
    config = SchedulerConfig(64, 256, 4096, decision_log=0)
    ends = np.sort([r.end for r in serve_targets(todo, config, 1_000, COST).requests])
    n = len(ends)
    assert (3 * n // 4 - n // 4) / (ends[3 * n // 4] - ends[n // 4]) == pytest.approx(FULL, rel=0.1)


@pytest.mark.parametrize("policy", ["deadline", "fair+deadline"])
def test_in_overload_more_requests_are_on_time_and_nearly_as_many_as_clairvoyance_allows(policy):
    found = run(policy, 1.2).attainment
    assert found >= 1.2 * run("fcfs", 1.2).attainment
    assert found >= 0.9 * run("deadline", 1.2, knows=True).attainment


@pytest.mark.parametrize("policy", ["deadline", "fair+deadline"])
@pytest.mark.parametrize("load", [0.6, 1.0])
def test_without_overload_nothing_is_lost(policy, load):
    assert run(policy, load).attainment >= 0.99 * run("fcfs", load).attainment


@pytest.mark.parametrize("policy", ["fcfs", "deadline", "fair+deadline"])
@pytest.mark.parametrize("overload", ["reject", "best_effort"])
def test_nobody_starves(policy, overload):
    """Everyone has an answer, a token or an end, by its deadline and a step."""
    for request in run(policy, 1.2, overload).requests:
        assert request.reason in ("stop", "deadline", "error")
        patience = request.target.ttft + 1024 * request.target.tpot
        assert request.wait <= patience + 0.5
        if policy != "fcfs" and overload == "reject":
            assert request.wait <= request.target.ttft + 0.5


def test_rejected_and_refused_requests_are_not_on_time():
    requests = run("deadline", 1.2).requests
    missed = [r for r in requests if r.reason != "stop"]
    assert missed and not any(r.on_time or r.on_pace for r in missed)


def test_the_true_lengths_stay_hidden_and_are_kept():
    for request in run("fcfs", 0.6).requests:
        assert request.reason == "stop" and request.tokens == request.output_tokens


def request(first: float, end: float, n: int = 11) -> TargetedRequest:
    return TargetedRequest(0.0, 5, n, Target(1.0, 2.0, 0.1), None, first, end, n, "stop")


def test_on_time_gives_credit_for_early_tokens_and_on_pace_does_not():
    assert request(2.0, 3.0).on_time and request(2.0, 3.0).on_pace
    assert not request(2.1, 3.0).on_time and not request(2.1, 3.0).on_pace
    assert not request(2.0, 3.1).on_time and not request(2.0, 3.1).on_pace
    assert request(0.5, 3.0).on_time and not request(0.5, 3.0).on_pace
    unfinished = replace(request(0.5, 0.6), tokens=3)
    assert not unfinished.on_time and not unfinished.on_pace


def test_targets_are_spread_evenly_in_their_shares():
    chosen = choose_targets(1000, MIX)
    for target in MIX:
        assert chosen.count(target) == pytest.approx(1000 * target.share, abs=4)
        assert chosen[:50].count(target) == pytest.approx(50 * target.share, abs=3)


def test_hindsight_leaves_out_as_few_as_possible():
    todo = [request(math.inf, math.inf) for _ in range(4)]  # all due at 2
    assert left_out_in_hindsight(todo, [1.5, 0.5, 0.9, 0.6]) == {0}
