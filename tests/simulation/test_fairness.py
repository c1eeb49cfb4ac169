"""Tenants side by side on the virtual clock: who gets how much, and who waits for whom.

A step takes 22.5 ms, 0.2 ms a token and 0.87 us a token of context: what reading 13.5 GB of weights
and 512 KiB of K/V a token take at 600 GB/s (a 7B model in float16). The pool has 10,000 tokens.
`benchmarks/bench_fairness.py` runs the same at full length.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from pagedkv.scheduling.tenants import Tenant
from pagedkv.simulation.executor import LinearCost
from pagedkv.simulation.fairness import ServiceLog
from pagedkv.simulation.serve import Server, SimulatedRun, serve
from pagedkv.simulation.trace import Trace, read_trace

COST = LinearCost(22.5e-3, 0.2e-3, 0.87e-6)
POOL = 10_000  # tokens
LONGEST = 256
U = max(1 * LONGEST, 2 * POOL)
V = 2 * POOL / 16
QUANTUM = 2048


def server(policy: str, **settings) -> Server:
    return Server(POOL // 16, max_num_batched_tokens=256, policy=policy, watermark=0.05, **settings)


def regular(
    rates: Mapping[str, float], seconds: float, start: Mapping[str, float] | None = None
) -> Trace:
    """Requests of 256 tokens in and 256 out, evenly spaced: so many a second of each tenant."""
    start = start or {}
    rows = sorted(
        (start.get(tenant, 0.0) + (i + (place + 1) / (len(rates) + 1)) / rate, tenant)
        for place, (tenant, rate) in enumerate(rates.items())
        for i in range(int((seconds - start.get(tenant, 0.0)) * rate))
    )
    return trace(rows)


def poisson(rates: Mapping[str, float], seconds: float) -> Trace:
    """The same at random; a tenant's arrivals do not depend on the others'."""
    rows = []
    for place, (tenant, rate) in enumerate(rates.items()):
        gaps = np.random.default_rng(place).exponential(1 / rate, int(seconds * rate * 1.5) + 50)
        rows += [(time, tenant) for time in np.cumsum(gaps).tolist() if time < seconds]
    return trace(sorted(rows))


def trace(rows: list[tuple[float, str]]) -> Trace:
    n = len(rows)
    times, tenants = zip(*rows, strict=True)
    return Trace(np.array(times), np.full(n, 256), np.full(n, 256), tenants, None, None)


def run(wanted: Trace, settings: Server, until: float) -> tuple[SimulatedRun, ServiceLog]:
    log = ServiceLog(wanted)
    return serve(wanted, settings, COST, until=until, observe=log.observe), log


def p99_ttft(result: SimulatedRun, tenant: str) -> float:
    waits = [r.ttft for r in result.requests if r.tenant == tenant]
    return float(np.nanpercentile(waits, 99))


@pytest.mark.parametrize(
    ("policy", "bound"), [("fair", 2 * U), ("fair+prefix", 2 * (U + V + QUANTUM))]
)
def test_a_flood_gets_no_more_than_its_rival_and_nothing_is_lost(policy: str, bound: float) -> None:
    """Far inside the bound, and first come, first served is not."""
    seconds = 60.0
    wanted = regular({"a": 1.5, "b": 3.0}, seconds)
    _, plain = run(wanted, server("fcfs"), seconds)
    _, fair = run(wanted, server(policy), seconds)
    assert fair.largest_gap("a", "b") <= min(bound, 8000) < plain.largest_gap("a", "b")
    total = [log.service("a") + log.service("b") for log in (plain, fair)]
    assert total[1] >= 0.98 * total[0]


def test_service_follows_the_weights() -> None:
    """Over so long that the gap, which does not grow, is small beside what was served."""
    seconds = 140.0
    weights = {"one": 1.0, "two": 2.0, "four": 4.0}
    tenants = tuple((name, Tenant(weight)) for name, weight in weights.items())
    wanted = regular(dict.fromkeys(weights, 3.0), seconds)
    _, log = run(wanted, server("fair", tenants=tenants), seconds)
    service = {name: log.service(name, start=20) for name in weights}
    for name, weight in weights.items():
        assert service[name] / sum(service.values()) == pytest.approx(weight / 7, rel=0.05)


@pytest.mark.parametrize("policy", ["fair", "fair+prefix"])
def test_a_tenant_that_returns_gets_as_much_as_who_stayed_and_no_more(policy: str) -> None:
    """`a` asks for nothing for 20 s; from then on the two get the same."""
    wanted = regular({"a": 3.0, "b": 3.0}, 50, start={"a": 20.0})
    _, log = run(wanted, server(policy), 50)
    a, b = log.service("a", 22, 50), log.service("b", 22, 50)
    assert a == pytest.approx(b, rel=0.08)


@pytest.mark.parametrize("policy", ["fair", "fair+prefix"])
def test_a_modest_tenant_hardly_notices_a_flood(policy: str) -> None:
    """Half of its share beside one that asks for exactly its share, then for 10 times that."""
    seconds, share = 100.0, 1.1
    waits = {}
    for flood in (1, 10):
        wanted = poisson({"modest": share / 2, "other": flood * share}, seconds)
        result, _ = run(wanted, server(policy), seconds)
        waits[flood] = p99_ttft(result, "modest")
    assert waits[10] <= 1.5 * waits[1]


def test_first_come_first_served_lets_a_flood_drown_everybody() -> None:
    """What the test above would see without fairness."""
    wanted = poisson({"modest": 0.55, "other": 11.0}, 30)
    result, _ = run(wanted, server("fcfs"), 30)
    assert p99_ttft(result, "modest") > 5


def test_longest_prefix_first_finds_more_in_the_cache() -> None:
    """Eight conversations of two tenants in turns, in a pool that holds two of them."""
    rng = np.random.default_rng(0)
    rows = 160
    which = rng.integers(8, size=rows)
    ids = tuple(
        np.concatenate([np.arange(8) + 100 * int(w), [10_000 + i]]) for i, w in enumerate(which)
    )
    tenants = tuple("ab"[int(w) % 2] for w in which)
    wanted = Trace(np.zeros(rows), np.full(rows, 9 * 64), np.full(rows, 16), tenants, 64, ids)
    hits = {}
    for policy in ("fair", "fair+prefix"):
        settings = Server(120, max_num_seqs=2, policy=policy, max_num_batched_tokens=256)
        hits[policy] = serve(wanted, settings, COST).cached_tokens
    assert hits["fair+prefix"] > 1.3 * hits["fair"]


def test_gaps_on_the_arena_trace_stay_inside_the_bound() -> None:
    """27 tenants; every pair that waits at the same time."""
    folder = os.environ.get("PAGEDKV_TRACES")
    if not folder:
        pytest.skip("no traces: set PAGEDKV_TRACES")
    wanted = read_trace(Path(folder) / "vtc_arena_27tenants.csv")
    bound = 2 * max(int(wanted.prompt_tokens.max()), 2 * POOL)
    _, log = run(wanted, server("fair"), 200.0)
    names = sorted(set(wanted.tenants or ()))
    assert len(names) == 27
    gaps = [log.largest_gap(a, b) for a, b in combinations(names, 2)]
    assert 0 < max(gaps) <= bound
    _, plain = run(wanted, server("fcfs"), 200.0)
    total = [sum(map(each.service, names)) for each in (plain, log)]
    assert total[1] >= 0.98 * total[0]


def test_the_largest_gap_is_that_of_the_worst_window() -> None:
    """Checked against all windows of all times, event by event."""
    wanted = regular({"a": 2.0, "b": 4.0}, 12)
    _, log = run(wanted, server("fcfs"), 12)
    times = sorted({*log._times["a"], *log._times["b"]})
    worst = 0.0
    start = max(log.backlogged("a")[-1][0], log.backlogged("b")[-1][0])
    inside = [time for time in times if time >= start]
    for i, first in enumerate(inside[::7]):
        for last in inside[i * 7 :: 7]:
            gap = abs(log.service("a", first, last) - log.service("b", first, last))
            worst = max(worst, gap)
    assert 0 < worst <= log.largest_gap("a", "b") <= worst + 2000
