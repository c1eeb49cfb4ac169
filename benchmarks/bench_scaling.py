"""How does the cost of a step grow with the batch and with the context, and that of the cache?

Run: python benchmarks/bench_scaling.py [--dtype bfloat16|float32] [--seconds 20] [--plot FILE]
         [--cpu-time]

  batch    a decode step of the embedded model, 1 to 64 rows of 256 tokens
  context  the same, 8 rows of 128 to 4,096 tokens
  cache    the block manager's work for a sequence and step, up to 4,096 sequences and a million
           blocks

All sizes, a read of memory and a product of matrices take turns; the fastest tenth of each counts.
The floor of a step is the larger of its bytes (weights and K/V) over the bandwidth and its
operations over the matrix rate, both of this run. Beside the least-squares line through the times
stand its residual and the line through the floors. Steps run in this process with their sampling,
K/V are random and scheduling is left out. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from calibration import print_calibration
from pagedkv.bench.cache import measure_cache
from pagedkv.bench.limits import Limits, Yardstick
from pagedkv.bench.rounds import fast, in_turns
from pagedkv.bench.steps import ModelSteps
from pagedkv.bench.work import step_work, total
from pagedkv.engine.build import set_threads
from pagedkv.engine.machine import THREADS_VARIABLE

MODEL, BLOCK = "smollm2-135m-instruct", 16
BATCHES, BATCH_CONTEXT = (1, 2, 4, 8, 16, 32, 64), 256
CONTEXTS, CONTEXT_BATCH = (128, 256, 512, 1024, 2048, 4096), 8
SEQUENCES = ((1, 10_000), (16, 10_000), (64, 32_768), (256, 32_768), (1024, 100_000))
MOST_SEQUENCES = (4096, 1_000_000)
Curve = tuple[Sequence[int], list[float], list[float]]  # size, seconds, floor


def curves(
    dtype: torch.dtype, wanted: Sequence[str], seconds: float, clock: Callable[[], float]
) -> dict[str, Curve]:
    """The curves of one dtype, all measured in turn."""
    shapes = {
        ("batch", batch): (batch, BATCH_CONTEXT) for batch in BATCHES if "batch" in wanted
    } | {("context", n): (CONTEXT_BATCH, n) for n in CONTEXTS if "context" in wanted}
    blocks = max(batch * -(-context // BLOCK) for batch, context in shapes.values())
    steps = ModelSteps(MODEL, dtype, blocks, block_size=BLOCK)
    yardstick = Yardstick(dtype)
    calls = {point: steps.step(*shape) for point, shape in shapes.items()}
    taken = in_turns({**calls, **yardstick.calls()}, seconds=seconds, clock=clock)
    limits = yardstick.limits(taken)
    print(f"\n{name_of(dtype)}, {len(taken['read'])} rounds; {limits}")
    found: dict[str, Curve] = {}
    for curve in ("batch", "context"):
        points = [point for point in shapes if point[0] == curve]
        if points:
            floors = [floor(steps, dtype, shapes[point], limits) for point in points]
            times = [fast(taken[point]) for point in points]
            found[curve] = [size for _, size in points], times, floors
    return found


def floor(steps: ModelSteps, dtype: torch.dtype, shape: tuple[int, int], limits: Limits) -> float:
    work = total(step_work(steps.model.config, dtype, *shape).values())
    return limits.floor(work.num_bytes, work.operations)


def print_curve(name: str, curve: Curve) -> None:
    sizes, times, floors = curve
    fixed = f"{BATCH_CONTEXT} tokens" if name == "batch" else f"{CONTEXT_BATCH} rows"
    print(f"{name:>8}{'ms':>10}{'floor':>10}{'share':>8}{'tokens/s':>10}   ({fixed})")
    for size, taken, least in zip(*curve, strict=True):
        rows = size if name == "batch" else CONTEXT_BATCH
        print(
            f"{size:>8}{taken * 1e3:10.2f}{least * 1e3:10.2f}{least / taken:8.0%}"
            f"{rows / taken:10.0f}"
        )
    unit = "row" if name == "batch" else "token of context"
    for label, values in (("measured", times), ("floor", floors)):
        start, slope, residual = line(sizes, values)
        print(
            f"{label:>8}: {start * 1e3:.2f} ms + {slope * 1e6:.2f} us a {unit}, "
            f"residual {residual:.1%} of the mean"
        )


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Start, slope, and the root of the mean square residual over the mean of y."""
    slope, start = np.polyfit(x, y, 1)
    rest = np.asarray(y) - (start + slope * np.asarray(x))
    return float(start), float(slope), float(np.sqrt((rest**2).mean()) / np.mean(y))


def print_cache(rounds: int, most: bool) -> None:
    print(f"\n{'seqs':>8}{'blocks':>11}{'us a seq':>10}{'open us':>9}{'fork us':>9}")
    for num_seqs, num_blocks in (*SEQUENCES, *((MOST_SEQUENCES,) if most else ())):
        times = measure_cache(num_seqs, num_blocks, BLOCK, rounds=rounds)
        print(
            f"{num_seqs:>8,}{num_blocks:>11,}{times.decode_us:10.2f}{times.open_us:9.0f}"
            f"{times.fork_us:9.0f}"
        )


def write_plot(path: Path, found: dict[str, dict[str, Curve]]) -> None:
    from pagedkv.simulation.charts import lines
    from pagedkv.simulation.report import page

    figures = []
    for name in ("batch", "context"):
        data = []
        for dtype, made in found.items():
            if name in made:
                sizes, times, floors = (np.asarray(values, float) for values in made[name])
                data += [(dtype, sizes, times * 1e3), (f"{dtype}, floor", sizes, floors * 1e3)]
        if data:
            what = f"{BATCH_CONTEXT} tokens" if name == "batch" else f"{CONTEXT_BATCH} rows"
            svg = lines(data, "rows" if name == "batch" else "tokens of context", "ms a step")
            figures.append((f"Step time against {name}", svg, f"Decode steps of {what}."))
    path.write_text(page("How the cost of a step grows", {"model": MODEL}, figures))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--seconds", type=float, default=20.0, help="for each dtype")
    parser.add_argument(
        "--curves", nargs="+", choices=("batch", "context", "cache"), default=["batch", "context"]
    )
    parser.add_argument("--plot", type=Path, help="HTML page of the curves")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of one thread: neighbours do not lengthen it"
    )
    options = parser.parse_args()
    if options.cpu_time:
        os.environ[THREADS_VARIABLE] = "1"
    clock = time.thread_time if options.cpu_time else time.perf_counter
    if options.plot is not None:
        from pagedkv.simulation.charts import require_matplotlib

        require_matplotlib()
    print_calibration()
    print(f"{set_threads()} threads{', CPU time' if options.cpu_time else ''}")
    found = {}
    if {"batch", "context"} & set(options.curves):
        for name in [options.dtype] if options.dtype else ["bfloat16", "float32"]:
            found[name] = curves(getattr(torch, name), options.curves, options.seconds, clock)
            for curve, values in found[name].items():
                print_curve(curve, values)
    if "cache" in options.curves:
        print_cache(20, most=options.seconds >= 1)
    if options.plot is not None:
        write_plot(options.plot, found)
        print(f"\nplots: {options.plot}")


if __name__ == "__main__":
    main()
