"""Does a simulation predict a real run from the costs of an earlier one?

Run: python benchmarks/bench_prediction.py [--seconds 120] [--load 0.7]

SmolLM2 in float32, invented requests (Poisson arrivals, geometric lengths, random tokens), 16
sequences at most, a pool that is large enough:

    1. all requests at once: the capacity of this machine now, in requests a second
    2. a recorded run at `load` times that; a cost model is fitted to it
    3. three real runs of other requests at the same load, the same ones each time
    4. these requests through `pagedkv simulate serve` at the fitted cost

The prediction beside the mean of the real runs, and its error:

    throughput, P50 of TTFT and TPOT    [bar: within 10 %]
    P99 of TTFT and TPOT                [bar: within 20 %, or twice the spread of the three runs]

The spread is (largest - smallest) / mean of the real runs: where it is as large as an error, the
figures say more about the machine than about the prediction. What is replayed of the recording has
to be identical. Nothing else is asserted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from calibration import print_calibration
from pagedkv import LLM, SamplingParams
from pagedkv.scheduling.messages import Add
from pagedkv.simulation.fitted import FittedCost
from pagedkv.simulation.replay_run import replay_run
from pagedkv.simulation.serve import RequestTimes, Server, SimulatedRun, serve
from pagedkv.simulation.trace import Trace
from pagedkv.simulation.workload import GeometricLengths, Poisson, invent

SERVER = Server(1024, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=1024)
LENGTHS = GeometricLengths(96, 32)
RUNS = 3


def real_run(llm: LLM, trace: Trace, seed: int) -> SimulatedRun:
    """The trace in real time through the engine's loop; nothing is found in the cache."""
    core = llm.engine.core
    core.reset_prefix_cache()
    rng = np.random.default_rng(seed)
    arrivals = np.zeros(len(trace)) if trace.arrivals is None else trace.arrivals
    coming = []
    for i, arrival in enumerate(arrivals.tolist()):
        prompt = tuple(rng.integers(100, 40_000, int(trace.prompt_tokens[i])).tolist())
        params = SamplingParams(
            temperature=0.0, max_tokens=int(trace.output_tokens[i]), ignore_eos=True
        )
        coming.append(Add(str(i), prompt, params, arrival, seed=i))
    times = [RequestTimes(a, int(n)) for a, n in zip(arrivals, trace.prompt_tokens, strict=True)]
    run = SimulatedRun(times, SERVER.num_blocks, SERVER.block_size)
    start = time.perf_counter()
    while coming or core.has_unfinished():
        now = time.perf_counter() - start
        while coming and coming[0].arrival <= now:
            core.send(coming.pop(0))
        if not core.has_unfinished():
            time.sleep(coming[0].arrival - now)
            continue
        deltas, _ = core.step(time.perf_counter() - start)
        run.note(deltas, time.perf_counter() - start)
    return run


def figures(run: SimulatedRun) -> dict[str, float]:
    """Tokens a second, milliseconds."""
    marks = {
        f"{name} {mark}": 1e3 * run.percentiles(name)[mark]
        for mark in ("p50", "p99")
        for name in ("ttft", "tpot")
    }
    return {"throughput": run.throughput} | marks


def compare(predicted: SimulatedRun, real: list[SimulatedRun]) -> None:
    print(f"{'':12}{'predicted':>11}{'real':>11}{'spread':>9}{'error':>9}{'bar':>9}")
    for name, value in figures(predicted).items():
        values = np.array([figures(run)[name] for run in real])
        mean = float(values.mean())
        spread = float(np.ptp(values)) / mean
        error = value / mean - 1
        bar = max(0.2, 2 * spread) if name.endswith("p99") else 0.1
        verdict = "" if abs(error) <= bar else "  missed"
        print(f"{name:12}{value:11.1f}{mean:11.1f}{spread:9.1%}{error:9.1%}{bar:9.1%}{verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="of each run")
    parser.add_argument("--load", type=float, default=0.7, help="share of the capacity")
    given = parser.parse_args()
    print_calibration()
    with tempfile.TemporaryDirectory() as folder:
        recording, part = Path(folder) / "recording", Path(folder) / "part"
        llm = LLM(
            "smollm2-135m-instruct",
            num_blocks=SERVER.num_blocks,
            max_num_seqs=SERVER.max_num_seqs,
            max_num_batched_tokens=SERVER.max_num_batched_tokens,
            max_model_len=SERVER.max_model_len,
            record=recording,
        )
        real_run(llm, invent(4, 1.0, Poisson(), LENGTHS, seed=0), 0)  # warms up
        backlog = invent(48, 1000.0, Poisson(), LENGTHS, seed=1)
        capacity = len(backlog) / real_run(llm, backlog, 1).seconds
        rate = given.load * capacity
        count = max(8, round(rate * given.seconds))
        print(f"capacity {capacity:.2f} requests/s, load {rate:.2f}, {count} requests a run")
        real_run(llm, invent(count, rate, Poisson(), LENGTHS, seed=2), 2)
        shutil.copy(recording, part)
        cost = FittedCost.of(part)
        print(f"fitted: {cost}")
        trace = invent(count, rate, Poisson(), LENGTHS, seed=3)
        real = [real_run(llm, trace, 3) for _ in range(RUNS)]
        compare(serve(trace, SERVER, cost), real)
        llm.close()
        replayed = replay_run(recording)
        assert replayed.difference is None, replayed.difference
        print(f"replayed: {replayed.num_decisions:,} entries of the log, all identical")
    print("load average " + " ".join(f"{x:.1f}" for x in os.getloadavg()), f"of {os.cpu_count()}")


if __name__ == "__main__":
    main()
