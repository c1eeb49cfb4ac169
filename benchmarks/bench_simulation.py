"""How many requests does `pagedkv simulate serve` put through in a minute?

Run: PAGEDKV_TRACES=folder python benchmarks/bench_simulation.py [--requests 2000] [--runs 3]

The first requests of azure2023_conv.csv go through the real loop, scheduler and block manager under
a virtual clock: prefix caching on, up to 256 sequences running, steps of up to 2,048 tokens, a pool
that holds them all. They arrive as recorded, and three times as fast, so that more of them run at
once.

    wall    requests a minute by the clock on the wall        [bar: 20,000, arriving as recorded]
    CPU     requests a minute by the time that this process had a core: on a machine that others
            use as well, what the wall clock would show without them

The best of the runs is printed; what disturbs one only makes it longer. Beside each figure stands
a plain Python loop right after that run: figures are compared at equal speeds of the machine only.
Nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from calibration import print_calibration
from pagedkv.bench.calibration import python_loop
from pagedkv.simulation.executor import LinearCost
from pagedkv.simulation.serve import Server, serve
from pagedkv.simulation.trace import Trace, read_trace

NAME = "azure2023_conv.csv"
SERVER = Server(num_blocks=40_000, max_num_seqs=256, max_num_batched_tokens=2048)
COST = LinearCost(19.9e-3, 101.9e-6, 0.63e-6)  # OPT-13B on one A100, DistServe's fits
SPEEDS = (1.0, 3.0)  # times as fast as recorded
BAR = 20_000


def show(trace: Trace, speed: float, runs: int) -> None:
    wall, cpu, loop = [], [], []
    for _ in range(runs):
        started, used = time.perf_counter(), time.process_time()
        run = serve(trace, SERVER, COST)
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - used)
        loop.append(python_loop())
    running = np.array([step.num_running for step in run.steps])
    per_minute = 60 * len(trace)
    print(
        f"arriving {speed:g} times as fast: {len(run.steps):,} steps, "
        f"{running.mean():.0f} running, at most {running.max()}"
    )
    for name, seconds in (("wall", wall), ("CPU", cpu)):
        best = int(np.argmin(seconds))
        print(
            f"  {name:4} {per_minute / seconds[best]:8,.0f} requests a minute   "
            f"(Python loop {loop[best]:.0f} ns an iteration)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    folder = os.environ.get("PAGEDKV_TRACES")
    if folder is None:
        print("did not run: PAGEDKV_TRACES says where the traces are, and is not set")
        return
    print_calibration()
    print(f"bar: {BAR:,} requests a minute of wall time, {NAME} as recorded")
    trace = read_trace(Path(folder) / NAME).first(options.requests)
    for speed in SPEEDS:
        arrivals = None if trace.arrivals is None else trace.arrivals / speed
        show(replace(trace, arrivals=arrivals), speed, options.runs)


if __name__ == "__main__":
    main()
