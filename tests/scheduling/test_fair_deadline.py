"""Tenants by their counters, their requests by due time, and what an urgent one may do."""

from __future__ import annotations

import math

import pytest
from harness import Run

from pagedkv.errors import ConfigError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import SamplingParams
from pagedkv.simulation.clock import VirtualClock
from pagedkv.simulation.executor import LinearCost, TimedExecutor


def order_of_ends(run: Run) -> list[str]:
    return [name for name, _ in run.ends]


def one_seat(**settings) -> Run:
    return Run(max_num_seqs=1, policy="fair+deadline", **settings)


def test_the_tenant_with_the_least_is_next_with_its_request_that_is_due_first():
    run = one_seat(urgent_slack=0.0)
    run.add("a, 9", [1], max_tokens=1, tenant="a", ttft_slo=9.0)
    run.add("a, 5", [2], max_tokens=1, tenant="a", ttft_slo=4.0)
    run.add("b, 99", [3], max_tokens=1, tenant="b", ttft_slo=97.0)
    run.finish()
    assert order_of_ends(run) == ["a, 5", "b, 99", "a, 9"]


@pytest.mark.parametrize("service,first", [(0.0, "calm"), (4.9, "calm"), (5.1, "urgent")])
def test_an_urgent_request_goes_first_if_its_tenant_has_little_more_than_the_least(service, first):
    """The tenant of the urgent one has been given 3 prompt tokens and an output token: 5."""
    run = one_seat(urgent_slack=10.0, urgent_service=service)
    run.add("before", [1, 2, 3], max_tokens=1, tenant="a", ttft_slo=1.0)
    run.add("calm", [4], max_tokens=1, tenant="b", ttft_slo=99.0)
    run.add("urgent", [5], max_tokens=1, tenant="a", ttft_slo=7.0)
    run.finish()
    assert order_of_ends(run)[:2] == ["before", first]


def test_without_urgency_the_counters_alone_decide():
    run = one_seat(urgent_slack=5.0, urgent_service=1e9)
    run.add("before", [1, 2, 3], max_tokens=1, tenant="a", ttft_slo=1.0)
    run.add("calm", [4], max_tokens=1, tenant="b", ttft_slo=99.0)
    run.add("due in 9", [5], max_tokens=1, tenant="a", ttft_slo=7.0)
    run.finish()
    assert order_of_ends(run) == ["before", "calm", "due in 9"]


def test_the_tenant_with_the_most_yields_and_of_its_requests_the_one_with_the_most_slack():
    run = Run(num_blocks=10, block_size=4, budget=64, policy="fair+deadline", prefix_caching=False)
    run.add("b", range(7), max_tokens=7, tenant="b", ttft_slo=1.0, tpot_slo=9.0)
    run.add("a tight", range(10), max_tokens=7, tenant="a", ttft_slo=4.0, tpot_slo=0.1)
    run.add("a loose", range(10), max_tokens=7, tenant="a", ttft_slo=4.0, tpot_slo=9.0)
    for _ in range(4):
        run.step()
    waiting = [request.id for request in run.scheduler._roster.waiting.requests()]
    assert waiting == ["a loose"]
    run.finish()


@pytest.mark.parametrize("name", ["urgent_slack", "urgent_service"])
@pytest.mark.parametrize("value", [-1, math.nan, True, "1", None])
def test_settings_of_urgency_are_checked(name, value):
    with pytest.raises(ConfigError, match=f"{name}="):
        SchedulerConfig(8, 8, 100, **{name: value})


def service_gap(urgent_slack: float, urgent_service: float) -> tuple[float, float]:
    """The greatest difference of service of two backlogged tenants, and U.

    Tenant a's requests are always urgent, tenant b's never; both always have some waiting.
    """
    blocks, longest, seats = 60, 24, 4
    run = Run(
        num_blocks=blocks,
        block_size=4,
        budget=16,
        max_num_seqs=seats,
        policy="fair+deadline",
        urgent_slack=urgent_slack,
        urgent_service=urgent_service,
    )
    run.core.executor = TimedExecutor(VirtualClock(), LinearCost(0.01, 0.001), vocab_size=50)
    for i in range(240):
        tenant = "ab"[i % 2]
        params = SamplingParams(max_tokens=1 + i % 7)
        prompt = (i % 50,) * (1 + i * 5 % longest)
        slo = 1e3 if tenant == "a" else 1e6
        run.core.send(Add(str(i), prompt, params, 0.0, i, tenant=tenant, ttft_slo=slo))
    served = {"a": 0.0, "b": 0.0}
    gap = 0.0
    started: set[str] = set()
    while run.core.has_unfinished():
        deltas, _ = run.core.step(run.core.executor.clock.now)
        roster = run.scheduler._roster
        for request in roster.running:
            if request.id not in started:
                started.add(request.id)
                served[request.tenant] += len(request.prompt)
        for delta in deltas:
            tenant = "ab"[int(delta.request_id) % 2]
            served[tenant] += 2 * len(delta.token_ids)
        if all(len(roster.waiting.line(tenant)) for tenant in "ab"):
            gap = max(gap, abs(served["a"] - served["b"]))
    return gap, max(1.0 * longest, 2.0 * blocks * 4)


def test_the_gap_between_tenants_is_bounded_and_v_is_what_urgency_costs():
    plain, u = service_gap(0.0, 0.0)
    small, _ = service_gap(1e5, 100.0)
    large, _ = service_gap(1e5, 600.0)
    assert plain <= 2 * u
    assert small <= 2 * (u + 100.0)
    assert large <= 2 * (u + 600.0)
    assert plain < small < large
    assert large > 500.0  # nearly all of V is used: the bound is not idle talk
