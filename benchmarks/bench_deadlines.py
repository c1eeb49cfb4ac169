"""How many requests are on time under each policy, from light load to overload?

Requests of azure2023_conv.csv (PAGEDKV_TRACES) through the real loop, scheduler and block manager;
only the time of a step is a model: DistServe's fit of OPT-13B on two A100 (perf_distserve_a100.csv;
a mixed step as `DistServeCost` says). Pool: 9,000 blocks of 16, some 118 GB at 800 KiB a token;
256 seats, 512 tokens a step, no prefix caching (the trace has no prefixes).

Load 1.0 is the throughput of a saturated server: the first 8,000 requests, all there at the start,
first come first served; the middle half of their ends over the time that they took. At load x the
first requests of the trace are squeezed into 30 minutes so that x times as many come.

Targets, mixed evenly: 40 % want the first token in 1 s and 0.1 s a token, 40 % 5 s and 0.2 s, 20 %
30 s and 0.4 s. On time: first token by arrival + ttft, last of n by (n - 1) * tpot after that.
A request is worth nothing, and ends, when 1,024 tokens should have been there. Whoever is refused,
rejected or expires was not on time. At most 64 requests wait (`--waiting`), whatever the policy.
Requests belong to eight tenants, whose shares are as 1, 1/2, ... 1/8. Nobody knows how long an
output will be.

Clairvoyant runs, the better of which counts: the policy `deadline` (a) told the true output length
of every request, which its Moore-Hodgson uses instead of the tenant's median; (b) after requests
that Moore-Hodgson drops in hindsight were refused at the door: it sees all arrivals to come, and
the work of each in seconds (prompt and true output by the cost model's coefficients, scaled so that
the mean is that of the saturated server); those kept are then served as in (a).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.simulation.goodput import (
    Target,
    TargetedRequest,
    TargetedRun,
    choose_targets,
    left_out_in_hindsight,
    serve_targets,
)
from pagedkv.simulation.perf_tables import read_cost
from pagedkv.simulation.trace import Trace, read_trace

MIX = (Target(0.4, 1.0, 0.1), Target(0.4, 5.0, 0.2), Target(0.2, 30.0, 0.4))
BLOCKS, SEATS, BUDGET, MODEL_LEN, MAX_TOKENS = 9_000, 256, 512, 16_384, 1_024
MAX_WAITING, TENANTS = 64, 8
SATURATED = 8_000  # requests: about those of a run
LOADS = (0.6, 0.8, 1.0, 1.2)
# Seconds a prompt token, a pair of tokens of a prompt, an output token, a token of its context: for
# the proportions of works in (b) only.
WORK = (6.9e-5, 5e-9, 6.9e-5, 3.4e-7)


def config(policy: str, waiting: int | None) -> SchedulerConfig:
    return SchedulerConfig(
        SEATS,
        BUDGET,
        MODEL_LEN,
        policy=policy,
        max_num_waiting=waiting,
        decision_log=0,
        overload="reject",
    )


def requests(trace: Trace, arrivals: np.ndarray) -> list[TargetedRequest]:
    n = len(arrivals)
    prompts = np.minimum(trace.prompt_tokens[:n], MODEL_LEN - MAX_TOKENS - 1).tolist()
    outputs = np.clip(trace.output_tokens[:n], 1, MAX_TOKENS).tolist()
    shares = 1 / np.arange(1, TENANTS + 1)
    bounds = np.cumsum(shares / shares.sum())[:-1]
    tenants = np.searchsorted(bounds, np.arange(n) * 0.7548776662466927 % 1.0, side="right")
    rows = zip(arrivals.tolist(), prompts, outputs, choose_targets(n, MIX), strict=True)
    return [
        TargetedRequest(*row, tenant=str(tenant))
        for row, tenant in zip(rows, tenants.tolist(), strict=True)
    ]


def capacity(trace: Trace, cost, count: int) -> float:
    """Requests a second of a saturated server."""
    endless = Target(1.0, 1e8, 1e5)
    todo = [replace(r, target=endless) for r in requests(trace, np.zeros(count))]
    run = serve_targets(todo, config("fcfs", None), BLOCKS, cost, max_tokens=MAX_TOKENS)
    ends = np.sort([request.end for request in run.requests])
    first, last = ends[count // 4], ends[3 * count // 4]
    print(f"Saturated: {count:,} requests in {run.seconds:,.0f} s; fitted: {run.cost_model}")
    return (3 * count // 4 - count // 4) / (last - first)


def works(todo: list[TargetedRequest], mean: float) -> list[float]:
    prompt = np.array([r.prompt_tokens for r in todo], float)
    output = np.array([r.output_tokens for r in todo], float)
    token, pair, drawn, context = WORK
    work = prompt * (token + pair * prompt / 2) + output * (drawn + context * (prompt + output / 2))
    return (work * mean / work.mean()).tolist()


def show(name: str, run: TargetedRun, window: float, started: float) -> None:
    each = [np.mean([r.on_time for r in run.requests if r.target == target]) for target in MIX]
    longest = max(request.wait for request in run.requests if request.reason)
    pace = np.mean([request.on_pace for request in run.requests])
    ends = Counter(request.reason or "refused" for request in run.requests)
    finished = sum(request.finished for request in run.requests)
    print(
        f"  {name:22s} goodput {run.attainment * len(run.requests) / window:6.3f} /s  "
        f"on time {run.attainment:6.1%} (1 s {each[0]:6.1%}, 5 s {each[1]:6.1%}, "
        f"30 s {each[2]:6.1%})  on pace {pace:6.1%}  "
        f"finished {finished:,}  longest wait {longest:5.1f} s"
        f"  preempted {run.num_preemptions}  given up {run.num_given_up:,}  "
        f"{dict(sorted(ends.items()))}  [{time.perf_counter() - started:.0f} s]",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="simulated")
    parser.add_argument("--capacity", type=float, help="requests/s, if it was measured before")
    parser.add_argument("--waiting", type=int, default=MAX_WAITING, help="requests, at most")
    parser.add_argument("--loads", type=float, nargs="+", default=list(LOADS))
    options = parser.parse_args()
    if "PAGEDKV_TRACES" not in os.environ:
        print("not run: PAGEDKV_TRACES names no folder with traces")
        return 0
    folder = Path(os.environ["PAGEDKV_TRACES"])
    trace = read_trace(folder / "azure2023_conv.csv")
    cost = read_cost(folder / "perf_distserve_a100.csv", "facebook/opt-13b", tensor_parallel=2)
    window = 60 * options.minutes
    full = options.capacity or capacity(trace, cost, SATURATED)
    print(f"Load 1.0: {full:.3f} requests/s")
    bars: list[tuple[str, bool]] = []
    for load in options.loads:
        count = min(int(load * full * window), len(trace))
        arrivals = trace.arrivals[:count] * (window / float(trace.arrivals[count - 1]))
        print(f"Load {load}: {count:,} requests in {window / 60:g} minutes")
        found: dict[str, float] = {}
        plans = [("fcfs", "fcfs", ""), ("deadline", "deadline", "")]
        plans += [("fair+deadline", "fair+deadline", "")]
        if load > 1.0:
            plans += [("clairvoyant (a)", "deadline", "a"), ("clairvoyant (b)", "deadline", "b")]
        for name, policy, knows in plans:
            started = time.perf_counter()
            todo = requests(trace, arrivals)
            out: frozenset[int] = frozenset()
            if knows == "b":
                out = left_out_in_hindsight(todo, works(todo, 1 / full))
            run = serve_targets(
                todo,
                config(policy, options.waiting),
                BLOCKS,
                cost,
                max_tokens=MAX_TOKENS,
                knows_lengths=bool(knows),
                left_out=out,
            )
            show(name, run, window, started)
            found[name] = run.attainment
        best = max((found[name] for name in found if name.startswith("clair")), default=0.0)
        for policy in ("deadline", "fair+deadline"):
            ratio = found[policy] / found["fcfs"]
            if load > 1.0:
                bars.append((f"load {load}: {policy} {ratio:.2f} x fcfs (1.2)", ratio >= 1.2))
                share = found[policy] / best
                bars.append(
                    (f"load {load}: {policy} {share:.1%} of clairvoyant (90 %)", share >= 0.9)
                )
            else:
                bars.append((f"load {load}: {policy} {ratio:.1%} of fcfs (99 %)", ratio >= 0.99))
    for text, met in bars:
        print(f"{'met    ' if met else 'NOT MET'}  {text}")
    return 0 if all(met for _, met in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
