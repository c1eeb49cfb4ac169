"""What does each mode of admission cost when requests come faster than they can be served?

Run: PAGEDKV_TRACES=folder python benchmarks/bench_admission.py [--requests 400] [--speed 3]

The first requests of azure2023_conv.csv, at `--speed` times their pace, go through the real
scheduler and block manager under a virtual clock, in a pool of `--blocks` blocks of 16. Without the
traces invented requests do. For each mode, with and without prefix caching:

    preempted   preemptions
    computed    tokens computed / those of max_tokens, which preempts nobody
    tokens/s    generated tokens a second of the whole run
    TTFT, TPOT  median and 99th percentile, seconds and milliseconds

`expected_peak` is shown at the quantiles 0.5 and 0.9. The figures do not depend on the machine's
speed. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from pagedkv.simulation.executor import LinearCost
from pagedkv.simulation.serve import Server, serve
from pagedkv.simulation.trace import Trace, read_trace
from pagedkv.simulation.workload import make_trace

COST = LinearCost(19.9e-3, 101.9e-6, 0.63e-6)  # OPT-13B on one A100, DistServe's fits
MODES = (
    ("first_chunk", 0.9),
    ("prompt", 0.9),
    ("expected_peak", 0.5),
    ("expected_peak", 0.9),
    ("max_tokens", 0.9),
)


def show(trace: Trace, server: Server) -> None:
    runs = [
        serve(trace, replace(server, admission=mode, admission_quantile=quantile), COST)
        for mode, quantile in MODES
    ]
    least = sum(step.num_tokens for step in runs[-1].steps)
    for (mode, quantile), run in zip(MODES, runs, strict=True):
        computed = sum(step.num_tokens for step in run.steps)
        ttft, tpot = run.percentiles("ttft"), run.percentiles("tpot")
        name = f"{mode} {quantile}" if mode == "expected_peak" else mode
        print(
            f"  {name:18} preempted {run.preemptions:5,}   computed {computed / least:5.2f}   "
            f"{run.throughput:6.1f} tokens/s   TTFT {ttft['p50']:6.1f} {ttft['p99']:6.1f} s   "
            f"TPOT {1e3 * tpot['p50']:5.1f} {1e3 * tpot['p99']:6.1f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--speed", type=float, default=3.0)
    parser.add_argument("--blocks", type=int, default=800)
    options = parser.parse_args()
    folder = os.environ.get("PAGEDKV_TRACES")
    if folder is None:
        print("PAGEDKV_TRACES is not set: requests are invented")
        trace = make_trace(options.requests, options.speed, 1200, 250)
    else:
        trace = read_trace(Path(folder) / "azure2023_conv.csv").first(options.requests)
        trace = trace.at_speed(options.speed)
    for caching in (True, False):
        print(f"prefix caching {'on' if caching else 'off'}")
        show(trace, Server(options.blocks, prefix_caching=caching))


if __name__ == "__main__":
    main()
