"""How do goodput and the cost of routing grow with the number of workers?

Run: python benchmarks/bench_cluster.py [--workers 10 100 1000] [--requests 100] [--rate 2.0]

For each number of workers so many requests a worker go through a simulated cluster, two of five
workers prefill and three decode: every worker has the real loop, scheduler, block manager and
moves, and before them stand the real router, dispatch and fence. Steps take what DistServe fitted
for OPT-13B on one A100, a worker's link has 25 GB/s. Lengths are drawn from azure2023_conv.csv
where PAGEDKV_TRACES says where it is, else they are geometric of the same means; arrivals are
Poisson.

    goodput     requests/s a worker that had their first token within 1 s and the others 60 ms apart
    decision    of the router, microseconds: median and P99, of the processor and by the clock
    report      of a worker to the router, microseconds of the processor, median
    CPU         seconds of this process, and milliseconds a request

The bar: 100,000 requests on 1,000 workers within 15 minutes of wall time, on a machine that does
nothing else. With the default that is the last line. Nothing is asserted.
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
BAR_WORKERS, BAR_REQUESTS, BAR_S = 1000, 100_000, 900.0


class TimedRouter(Router):
    """A router that says what its answers took: (processor, clock) in seconds, by kind of event."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self.took: dict[type, list[tuple[float, float]]] = {Arrival: [], WorkerReport: []}

    def handle(self, event: RouterEvent, now: float) -> list[Decision]:
        took = self.took.get(type(event))
        if took is None:
            return super().handle(event, now)
        clock, cpu = time.perf_counter(), time.thread_time()
        decisions = super().handle(event, now)
        took.append((time.thread_time() - cpu, time.perf_counter() - clock))
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
    decisions, reports = (np.array(took) * 1e6 for took in routers[0].took.values())
    p50, p99 = np.percentile(decisions, (50, 99), axis=0)
    steps = sum(worker.steps for worker in run.workers)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{workers:7,}{len(trace):9,}{run.goodput(OBJECTIVE):9.3f}{run.attainment(OBJECTIVE):8.1%}"
        f"{p50[0]:8.0f}{p99[0]:6.0f}{p50[1]:8.0f}{p99[1]:6.0f}{np.median(reports[:, 0]):8.1f}"
        f"{run.moves.received:9,}{steps:11,}{cpu:9.1f}{1e3 * cpu / len(trace):8.2f}{wall:9.1f}"
        f"{memory:7.1f}",
        flush=True,
    )
    if (workers, len(trace)) == (BAR_WORKERS, BAR_REQUESTS):
        print(
            f"{len(trace):,} requests on {workers:,} workers: {wall:.0f} s of wall time, "
            f"{cpu:.0f} s of CPU time [bar: {BAR_S:.0f} s of wall time]"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--requests", type=int, default=100, help="a worker")
    parser.add_argument("--rate", type=float, default=2.0, help="requests/s a worker")
    options = parser.parse_args()
    print_calibration()
    lengths = read_lengths()
    print(
        f"{'':33}{'decision us':>28}{'report':>8}\n{'workers':>7}{'requests':>9}{'goodput':>9}"
        f"{'well':>8}{'P50':>8}{'P99':>6}{'clock':>8}{'P99':>6}{'us':>8}{'moved':>9}{'steps':>11}"
        f"{'CPU s':>9}{'ms each':>8}{'wall s':>9}{'GiB':>7}"
    )
    for workers in options.workers:
        show(workers, options.requests, options.rate, lengths)


if __name__ == "__main__":
    main()
