"""Tenants get equal service; being idle, aborting or being preempted changes nothing of that."""

from __future__ import annotations

import pytest
from harness import Run

from pagedkv.errors import ConfigError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.policies.counters import TokenCounters
from pagedkv.scheduling.tenants import Tenant, TenantTable

ORDINARY = TenantTable((), Tenant())


def order_of_start(run: Run) -> list[str]:
    """Names of the requests by their first token, of those that have had none yet."""
    before = {delta.request_id for delta in run.deltas}
    run.finish()
    return [name for name in dict.fromkeys(d.request_id for d in run.deltas) if name not in before]


def test_tenants_take_turns_however_many_requests_one_has() -> None:
    run = Run(max_num_seqs=1, policy="fair")
    for i in range(6):
        run.add(f"a{i}", [i + 1, 2, 3], tenant="a", max_tokens=2)
    for i in range(2):
        run.add(f"b{i}", [i + 1, 2, 3], tenant="b", max_tokens=2)
    assert order_of_start(run) == ["a0", "b0", "a1", "b1", "a2", "a3", "a4", "a5"]


def test_requests_without_a_tenant_are_one_tenant() -> None:
    run = Run(max_num_seqs=1, policy="fair")
    for i in range(3):
        run.add(f"none{i}", [i + 1, 2, 3], max_tokens=2)
    run.add("b0", [9, 2, 3], tenant="b", max_tokens=2)
    assert order_of_start(run) == ["none0", "b0", "none1", "none2"]


def test_a_weight_of_two_is_served_twice_as_often() -> None:
    run = Run(max_num_seqs=1, policy="fair", tenants=(("b", Tenant(weight=2)),))
    for i in range(6):
        run.add(f"a{i}", [i + 1, 2, 3], tenant="a", max_tokens=2)
        run.add(f"b{i}", [i + 1, 2, 3], tenant="b", max_tokens=2)
    first = order_of_start(run)[:9]
    assert sum(name.startswith("b") for name in first) == 6


def test_output_counts_twice_and_prompt_once() -> None:
    """One tenant's 8 prompt tokens and 1 of output weigh as much as 2 and 4: 10 each."""
    run = Run(max_num_seqs=1, policy="fair")
    for i in range(4):
        run.add(f"long{i}", [i + 1] * 8, tenant="a", max_tokens=1)
        run.add(f"short{i}", [i + 20] * 2, tenant="b", max_tokens=4)
    names = order_of_start(run)
    assert names == [f"{kind}{i}" for i in range(4) for kind in ("long", "short")]


def test_who_was_idle_has_no_credit() -> None:
    run = Run(max_num_seqs=1, policy="fair")
    run.add("b0", [1, 2, 3], tenant="b", max_tokens=1)
    for i in range(8):
        run.add(f"a{i}", [i + 1, 2, 3], tenant="a", max_tokens=4)
    while run.request("a4") is None or not run.request("a4").branches:
        run.step()
    for i in range(1, 4):
        run.add(f"b{i}", [i + 1, 2, 3], tenant="b", max_tokens=4)
    run.step()
    assert order_of_start(run) == ["b1", "a5", "b2", "a6", "b3", "a7"]


def test_what_is_computed_again_is_charged_to_nobody() -> None:
    run = Run(policy="fair")
    run.add("a", [1, 2, 3, 4, 5], tenant="a", max_tokens=6)
    for _ in range(3):
        run.step()
    run.preempt("a")
    run.manager.reset_cache()
    run.finish()
    assert run.scheduler._roster.policy.counters["a"] == 5 + 2 * 6


def test_a_prompt_given_up_halfway_is_paid_as_far_as_it_was_computed() -> None:
    run = Run(policy="fair", budget=8)
    run.add("a", range(1, 31), tenant="a", max_tokens=6)
    run.step()
    run.step()
    run.abort("a")
    run.finish()
    assert run.scheduler._roster.policy.counters["a"] == 16


def test_cached_tokens_are_paid_like_others() -> None:
    run = Run(policy="fair")
    for name in ("first", "again"):
        run.add(name, range(1, 14), tenant="a", max_tokens=1)
        run.finish()
    assert run.cached("again") == 12
    assert run.scheduler._roster.policy.counters["a"] == 2 * (13 + 2)


def test_every_sample_is_paid() -> None:
    run = Run(policy="fair")
    run.add("a", [1, 2, 3], tenant="a", max_tokens=4, n=3, temperature=1.0, ignore_eos=True)
    run.finish()
    assert run.scheduler._roster.policy.counters["a"] == 3 + 2 * 3 * 4


def test_the_tenant_with_the_most_yields_first() -> None:
    """`a` came first and has had more than `b`: the newer `b` keeps its blocks."""
    run = Run(num_blocks=8, block_size=4, policy="fair", prefix_caching=False)
    run.add("oldest", [1] * 4, tenant="a", max_tokens=10)
    run.add("a", [2] * 8, tenant="a", max_tokens=8)
    run.add("b", [3] * 4, tenant="b", max_tokens=12)
    preempted = set()
    while run.core.has_unfinished():
        run.step()
        preempted |= {r.id for r in run.scheduler._roster.waiting.requests() if r.admitted}
    assert preempted == {"a"}


def test_a_tenant_runs_no_more_than_its_quota_and_others_pass_it() -> None:
    run = Run(policy="fcfs", tenants=(("a", Tenant(max_running=1)),))
    for i in range(3):
        run.add(f"a{i}", [i + 1, 2], tenant="a", max_tokens=3)
    run.add("b", [9, 2], tenant="b", max_tokens=3)
    run.step()
    assert [r.id for r in run.scheduler._roster.running] == ["a0", "b"]
    while run.core.has_unfinished():
        assert sum(r.tenant == "a" for r in run.scheduler._roster.running) <= 1
        run.step()
    assert not run.scheduler._roster._started


def test_who_waited_for_its_own_quota_has_no_credit_either() -> None:
    run = Run(max_num_seqs=4, policy="fair", tenants=(("a", Tenant(max_running=1)),))
    run.add("a0", [1, 2], tenant="a", max_tokens=30)
    run.add("a1", [2, 2], tenant="a", max_tokens=30)
    for i in range(40):
        run.add(f"b{i}", [i + 1, 2, 3, 4, 5, 6], tenant="b", max_tokens=8)
    run.step()
    while run.request("a0") is not None:
        run.step()
    counters = run.scheduler._roster.policy.counters
    assert run.request("b39") is not None, "b still waits"
    assert counters["a"] >= counters["b"] - (6 + 2 * 8)
    run.finish()


@pytest.mark.parametrize(
    ("quota", "message"),
    [
        (Tenant(max_waiting=2), "tenant 'a': 2 requests wait and max_waiting=2"),
        (Tenant(max_waiting_tokens=8), "tokens wait, one of 3 is too much for max_waiting_tokens"),
    ],
)
def test_a_tenant_over_its_quota_is_refused_with_the_numbers(quota: Tenant, message: str) -> None:
    run = Run(max_num_seqs=1, errors_ok=True, tenants=(("a", quota),))
    run.add("runs", [1, 2, 3], tenant="b", max_tokens=5)
    run.step()
    for i in range(3):
        run.add(f"a{i}", [i + 1, 2, 3], tenant="a", max_tokens=1)
    run.step()
    assert run.reason("a2") == "error" and message in run.ends["a2", 0].error
    run.add("b", [1, 2, 3], tenant="b", max_tokens=1)
    run.finish()
    assert run.reason("b") == run.reason("a1") == "length"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"policy": "fairest"}, "policy='fairest' is unknown"),
        ({"policy": 3}, "policy=3 is unknown"),
        ({"ageing": 0}, "ageing=0 must be seconds above 0"),
        ({"ageing": float("nan")}, "ageing=nan"),
        ({"tenants": (("a", Tenant(weight=0)),)}, "tenant 'a': weight=0 must be above 0"),
        ({"tenants": (("a", Tenant(weight=-1.0)),)}, "tenant 'a': weight=-1.0"),
        ({"tenants": (("a", Tenant(weight=float("nan"))),)}, "tenant 'a': weight=nan"),
        ({"tenants": (("a", Tenant(weight="2")),)}, "tenant 'a': weight='2'"),
        ({"tenants": (("a", Tenant(max_running=0)),)}, "tenant 'a': max_running=0"),
        ({"tenants": (("a", Tenant(max_waiting=1.5)),)}, "tenant 'a': max_waiting=1.5"),
        ({"tenants": (("", Tenant()),)}, "name '' must be a text"),
        ({"tenants": (("a", 2.0),)}, "tenant 'a': 2.0 must be a pagedkv.Tenant"),
        ({"tenants": (("a", Tenant()), ("a", Tenant()))}, "'a' is there twice"),
        ({"tenants": {"a": Tenant()}}, "must be a tuple of pairs"),
        ({"default_tenant": Tenant(weight=-2)}, "default_tenant: weight=-2"),
    ],
)
def test_settings_that_cannot_be_are_named(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Run(**setting)
    assert message in str(caught.value)


def test_settings_are_hashable() -> None:
    config = SchedulerConfig(1, 1, 2, tenants=(("a", Tenant(2.0)),))
    assert hash(config) == hash(SchedulerConfig(1, 1, 2, tenants=(("a", Tenant(2.0)),)))


def test_a_hundred_thousand_tenants_are_forgotten_and_a_debt_is_not() -> None:
    counters = TokenCounters(ORDINARY)
    for tenant in ("waits", "debtor"):
        counters.join(tenant, [])
    counters.start("debtor", 1e7)
    counters.end("debtor", 0)
    counters.start("busy", 5)
    for i in range(100_000):
        counters.join(f"t{i}", ["waits"])
        counters.start(f"t{i}", 10)
        counters.end(f"t{i}", 0)
        counters.charge("waits", 10)
        assert len(counters) < 100
    assert counters["debtor"] == 1e7
    counters.join("new", ["waits"])
    assert counters["new"] == counters["waits"]


def test_counters_start_over_before_they_lose_precision() -> None:
    counters = TokenCounters(ORDINARY)
    for tenant in ("a", "b"):
        counters.join(tenant, [])
    for tenant in ("a", "b"):
        counters.start(tenant, 2.0**45)
    counters.charge("a", 7.0)
    counters.join("c", ["a", "b"])
    assert counters["b"] == counters["c"] == 0.0
    assert counters["a"] - counters["b"] == 7.0
