"""Are tenants served equally, what does it cost, and does a flood drown those who ask for little?

Simulated with the real scheduler and block manager. A step takes 22.5 ms, 0.2 ms a token and 0.87
us a token of context: what reading 13.5 GB of weights and 512 KiB of K/V a token take at 600 GB/s
(a 7B model in float16). Pool of 10,000 tokens, 256 tokens a step, prefix caching on, watermark 5 %.
Service is 1 a prompt token, charged when its request starts, and 2 an output token.

    overload   two tenants at 1.5 and 3 requests a second, 256 tokens in and out, 360 s
    arena      27 tenants of vtc_arena_27tenants.csv (PAGEDKV_TRACES), 600 s: the worst pair
    weights    three tenants that want all there is, weights 1:2:4
    return     a tenant that is idle for half of the time, beside one that never is
    isolation  a tenant at a quarter and at half of its share beside one at 1, 2, 10 and 100 times
               its share, Poisson arrivals; P99 of the time to its first token
    prefixes   conversations of two tenants in a pool that does not hold all of them

The gap is the largest difference of service of two tenants, of all windows in which both have
requests waiting throughout. The bound is that of the paper (Sheng et al., OSDI 2024), 2 * max(1 *
longest prompt, 2 * tokens of the pool), and for fair+prefix 2 * (U + V + Q), see `FairPrefix`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from pagedkv.scheduling.policies.fair_prefix import QUANTUM
from pagedkv.scheduling.tenants import Tenant
from pagedkv.simulation.executor import LinearCost
from pagedkv.simulation.fairness import ServiceLog
from pagedkv.simulation.serve import Server, SimulatedRun, serve
from pagedkv.simulation.trace import Trace, read_trace

COST = LinearCost(22.5e-3, 0.2e-3, 0.87e-6)
POOL = 10_000
SHARE = 1.1  # requests of 256 in and 256 out a second: half of what the server can do
POLICIES = ("fair", "fair+prefix")


def server(policy: str, tenants: tuple[tuple[str, Tenant], ...] = ()) -> Server:
    return Server(
        POOL // 16, max_num_batched_tokens=256, policy=policy, watermark=0.05, tenants=tenants
    )


def bound(policy: str, longest: int) -> float:
    u = max(longest, 2 * POOL)
    return 2 * u if policy == "fair" else 2 * (u + 2 * POOL / 16 + QUANTUM)


def run(wanted: Trace, settings: Server, until: float) -> tuple[SimulatedRun, ServiceLog]:
    log = ServiceLog(wanted)
    return serve(wanted, settings, COST, until=until, observe=log.observe), log


def trace(rows: Sequence[tuple[float, str]]) -> Trace:
    """Requests of 256 tokens in and 256 out, of tenants at times."""
    times, tenants = zip(*sorted(rows), strict=True)
    n = len(rows)
    return Trace(np.array(times), np.full(n, 256), np.full(n, 256), tenants, None, None)


def regular(rates: Mapping[str, float], seconds: float) -> list[tuple[float, str]]:
    return [
        ((i + (place + 1) / (len(rates) + 1)) / rate, tenant)
        for place, (tenant, rate) in enumerate(rates.items())
        for i in range(int(seconds * rate))
    ]


def poisson(rates: Mapping[str, float], seconds: float) -> list[tuple[float, str]]:
    """A tenant's arrivals do not depend on the others'."""
    rows = []
    for place, (tenant, rate) in enumerate(rates.items()):
        gaps = np.random.default_rng(place).exponential(1 / rate, int(seconds * rate * 1.5) + 50)
        rows += [(time, tenant) for time in np.cumsum(gaps).tolist() if time < seconds]
    return rows


def verdict(met: bool) -> str:
    return "met" if met else "NOT MET"


def show_gaps(name: str, wanted: Trace, seconds: float) -> None:
    """The worst pair, and total service beside first come, first served."""
    tenants = sorted(set(wanted.tenants or ()))
    longest = int(wanted.prompt_tokens.max())
    plain = 0.0
    for policy in ("fcfs", *POLICIES):
        result, log = run(wanted, server(policy), seconds)
        gap = max(log.largest_gap(a, b) for a, b in combinations(tenants, 2))
        total = sum(map(log.service, tenants))
        plain = plain or total
        line = f"{name:10s} {policy:12s} largest gap {gap:9,.0f}   service {total / plain:6.1%}"
        if policy != "fcfs":
            line += f"   gap <= {bound(policy, longest):,.0f}: "
            line += verdict(gap <= bound(policy, longest))
            line += f"   service >= 98 %: {verdict(total >= 0.98 * plain)}"
        print(f"{line}   {result.preemptions:,} preemptions", flush=True)


def show_weights(seconds: float) -> None:
    weights = {"one": 1.0, "two": 2.0, "four": 4.0}
    wanted = trace(regular(dict.fromkeys(weights, 3.0), seconds))
    tenants = tuple((name, Tenant(weight)) for name, weight in weights.items())
    for policy in POLICIES:
        _, log = run(wanted, server(policy, tenants), seconds)
        served = {name: log.service(name, start=20) for name in weights}
        parts = {name: 7 * amount / sum(served.values()) for name, amount in served.items()}
        met = all(abs(parts[name] / weight - 1) <= 0.05 for name, weight in weights.items())
        shown = " : ".join(f"{part:.2f}" for part in parts.values())
        print(f"weights    {policy:12s} {shown}   within 5 %: {verdict(met)}", flush=True)


def show_return(seconds: float) -> None:
    rows = regular({"stays": 3.0, "returns": 3.0}, seconds)
    half = seconds / 2
    wanted = trace([row for row in rows if row[1] == "stays" or row[0] >= half])
    for policy in POLICIES:
        _, log = run(wanted, server(policy), seconds)
        served = [log.service(name, half, seconds) for name in ("returns", "stays")]
        over = served[0] - served[1]
        print(
            f"return     {policy:12s} {served[0]:,.0f} beside {served[1]:,.0f} from its return on"
            f"   no more than one request ahead: {verdict(over <= 256 + 2 * 256)}",
            flush=True,
        )


def show_isolation(part: float, seconds: float) -> None:
    """A tenant that asks for `part` of its share."""
    for policy in POLICIES:
        p99 = {}
        for flood in (1, 2, 10, 100):
            wanted = trace(poisson({"modest": part * SHARE, "other": flood * SHARE}, seconds))
            result, _ = run(wanted, server(policy), seconds)
            waits = [r.ttft for r in result.requests if r.tenant == "modest"]
            p99[flood] = float(np.nanpercentile(waits, 99))
        floods = [p99[flood] for flood in (2, 10, 100)]
        shown = "   ".join(f"{flood}x {p99[flood]:.3f} s" for flood in p99)
        print(
            f"isolation  {policy:12s} at {part:.0%} ({len(waits):,} requests)   P99 TTFT {shown}"
            f"   <= 1.5 * 1x: "
            f"{verdict(max(floods) <= 1.5 * p99[1])} ({max(floods) / p99[1]:.2f})   floods within "
            f"10 %: {verdict(max(floods) <= 1.1 * min(floods))} ({max(floods) / min(floods):.2f})",
            flush=True,
        )


def show_prefixes() -> None:
    """Requests of 8 conversations at random, 9 blocks of 64 tokens each, 8 of them in common."""
    rng = np.random.default_rng(0)
    which = rng.integers(8, size=400).tolist()
    ids = tuple(np.append(np.arange(8) + 100 * w, 10_000 + i) for i, w in enumerate(which))
    tenants = tuple("ab"[w % 2] for w in which)
    n = len(which)
    wanted = Trace(np.zeros(n), np.full(n, 9 * 64), np.full(n, 16), tenants, 64, ids)
    for policy in POLICIES:
        settings = Server(120, max_num_seqs=2, max_num_batched_tokens=256, policy=policy)
        cached = serve(wanted, settings, COST).cached_tokens
        print(f"prefixes   {policy:12s} {cached / (n * 9 * 64):.1%} of prompt tokens cached")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1200, help="of isolation, simulated")
    seconds = parser.parse_args().seconds
    show_gaps("overload", trace(regular({"a": 1.5, "b": 3.0}, 360)), 360)
    folder = os.environ.get("PAGEDKV_TRACES")
    if folder:
        show_gaps("arena", read_trace(Path(folder) / "vtc_arena_27tenants.csv"), 600)
    else:
        print("arena      did not run: set PAGEDKV_TRACES")
    show_weights(360)
    show_return(360)
    show_prefixes()
    for part in (0.25, 0.5):
        show_isolation(part, seconds)


if __name__ == "__main__":
    main()
