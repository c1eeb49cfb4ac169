"""How do goodput and the cost of routing grow with the number of workers?

Run: python benchmarks/bench_cluster.py [--workers 8 32 128] [--requests 25] [--rate 2.0]

For each number of workers so many requests a worker go through a simulated cluster, two of five
workers prefill and three decode: every worker has the real loop, scheduler and block manager, and
before them stand the real router and fence. Steps take what DistServe fitted for OPT-13B on one
A100, a worker's link has 25 GB/s. Lengths are drawn from azure2023_conv.csv where PAGEDKV_TRACES
says where it is, else they are geometric of the same means; arrivals are Poisson.

    goodput     requests/s a worker that had their first token within 1 s and the others 60 ms apart
    router      microseconds of a decision, median and P99; and of a worker's report, median
    CPU         seconds of this process, and milliseconds a request

On a machine that others use as well the P99 is how long they take the core away; the median is not.

The largest case that is meant: --workers 1000 --requests 100, which is 100,000 requests [bar: 15
minutes of wall time on a machine that does nothing else]. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path

import numpy as np

from calibration import print_calibration
from pagedkv.simulation.cluster import ClusterShape, serve_cluster
from pagedkv.simulation.executor import LinearCost
from pagedkv.simulation.objective import Objective
from pagedkv.simulation.serve import Server
from pagedkv.simulation.workload import GeometricLengths, Lengths, LengthTable, Poisson, invent
from pagedkv.transfer.router import Router
from pagedkv.transfer.routing import Arrival, Decision, RouterConfig, RouterEvent, WorkerReport

COST = LinearCost(19.9e-3, 101.9e-6, 0.63e-6)
SERVER = Server(6000, max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=8192)
TOKEN_BYTES = 819_200  # of OPT-13B: 40 layers, 40 heads of 128, float16
OBJECTIVE = Objective(1.0, 0.06)


class TimedRouter(Router):
    """A router that says what its answers took, in seconds by kind of event."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self.took: dict[type, list[float]] = {Arrival: [], WorkerReport: []}

    def handle(self, event: RouterEvent, now: float) -> list[Decision]:
        started = time.perf_counter()
        decisions = super().handle(event, now)
        if type(event) in self.took:
            self.took[type(event)].append(time.perf_counter() - started)
        return decisions


def read_lengths() -> Lengths:
    folder = os.environ.get("PAGEDKV_TRACES")
    if folder is None:
        return GeometricLengths(1155, 211)
    return LengthTable.read(Path(folder) / "azure2023_conv.csv")


def show(workers: int, requests: int, rate: float, lengths: Lengths) -> None:
    prefill = max(1, round(0.4 * workers))
    shape = ClusterShape(
        SERVER, prefill=prefill, decode=max(1, workers - prefill), token_bytes=TOKEN_BYTES
    )
    trace = invent(workers * requests, rate * workers, Poisson(), lengths, 1)
    routers: list[TimedRouter] = []

    def make_router(config: RouterConfig) -> TimedRouter:
        routers.append(TimedRouter(config))
        return routers[-1]

    wall, cpu = time.perf_counter(), time.process_time()
    run = serve_cluster(trace, shape, COST, make_router=make_router)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    decisions, reports = (np.array(times) * 1e6 for times in routers[0].took.values())
    steps = sum(worker.steps for worker in run.workers)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{workers:5} workers {len(trace):7,} requests   goodput {run.goodput(OBJECTIVE):.3f}, "
        f"{run.attainment(OBJECTIVE):.1%} served well   "
        f"router {np.median(decisions):.0f} us, P99 {np.percentile(decisions, 99):.0f} us, "
        f"report {np.median(reports):.1f} us   {run.moves.received:,} moved, {steps:,} steps   "
        f"CPU {cpu:.1f} s, {1e3 * cpu / len(trace):.2f} ms a request, wall {wall:.1f} s, "
        f"{memory:.1f} GiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--requests", type=int, default=25, help="a worker")
    parser.add_argument("--rate", type=float, default=2.0, help="requests/s a worker")
    options = parser.parse_args()
    print_calibration()
    lengths = read_lengths()
    for workers in options.workers:
        show(workers, options.requests, options.rate, lengths)


if __name__ == "__main__":
    main()
