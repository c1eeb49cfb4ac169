"""What do the figures cost, beside a step?

For each iteration: the status of the core and its frame, made by the core; what the metrics make of
a batch, in the front. Steps are those of the toy model, which takes less time than any other; the
medians are printed. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import statistics
import time

from prometheus_client import CollectorRegistry, generate_latest

from bench_picture import engine
from calibration import print_calibration
from pagedkv.engine.status import core_status
from pagedkv.engine.wire import Batch, pack
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import SamplingParams
from pagedkv.server.metrics.requests import RequestMeter
from pagedkv.server.metrics.status import StatusCollector


def measure(num_blocks: int, running: int, rounds: int) -> None:
    core = engine(num_blocks, running)
    while len(core.scheduler.roster.running) < running:
        core.step(0.0)
    registry = CollectorRegistry()
    meter = RequestMeter(registry, time.monotonic)
    registry.register(StatusCollector(lambda: core_status(core), 20))
    for name in core.scheduler.roster.requests:
        meter.sent(Add(name, (1,), SamplingParams(max_tokens=4096), 0.0, 0))
    times: dict[str, list[float]] = {"step": [], "status": [], "frame": [], "metrics": []}
    for _ in range(rounds):
        marks = [time.perf_counter()]
        deltas, stats = core.step(0.0)
        marks.append(time.perf_counter())
        batch = Batch(tuple(deltas), stats, 0, core_status(core))
        marks.append(time.perf_counter())
        pack(batch)
        marks.append(time.perf_counter())
        meter.take(batch)
        marks.append(time.perf_counter())
        for name, begin, end in zip(times, marks, marks[1:], strict=False):
            times[name].append(end - begin)
    begin = time.perf_counter()
    size = len(generate_latest(registry))
    scrape = time.perf_counter() - begin
    medians = "   ".join(f"{n} {statistics.median(t) * 1e6:7.0f} us" for n, t in times.items())
    print(
        f"{num_blocks:>7,} blocks {running:>4} running   {medians}   "
        f"scrape {scrape * 1e3:.1f} ms, {size:,} bytes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=101)
    rounds = parser.parse_args().rounds
    print_calibration()
    for num_blocks in (1_000, 100_000):
        for running in (8, 64):
            measure(num_blocks, running, rounds)


if __name__ == "__main__":
    main()
