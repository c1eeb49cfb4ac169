"""Linear layers of SmolLM2-135M: the native kernels against torch's F.linear.

Run: python benchmarks/bench_linear.py [--dtype float32|bfloat16] [--isa NAME]

For each layer and number of rows T both compute the same product, call by call in turn, over
copies of the weights that together are larger than the caches, as one decode step finds them.
Printed is the time that the fastest tenth of the calls kept, the ratio, what the native kernel
reads (GB/s) and computes (GFLOP/s). The machine's load and a calibration loop of the same run
stand beside them.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.nn.functional as F

from calibration import print_calibration
from pagedkv.attention.native import import_native
from pagedkv.bench.rounds import fast
from pagedkv.models.linear import Linear, NativeLinear, PlainLinear
from pagedkv.models.packed import PackedMatrix

SHAPES = {  # K, N
    "qkv": (576, 960),
    "output": (576, 576),
    "gate_up": (576, 3072),
    "down": (1536, 576),
    "head": (576, 49152),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 512)
COLD_BYTES = 64 * 2**20
SECONDS = 0.25  # for a figure
MIN_ROUNDS = 3


def measure(pairs: list[tuple[Linear, Linear]], x: torch.Tensor) -> tuple[float, float]:
    """Seconds of a call of each kind: the fastest tenth, so that a neighbour's load weighs less."""
    times: tuple[list[float], list[float]] = ([], [])
    end, rounds = time.perf_counter() + SECONDS, 0
    while rounds < MIN_ROUNDS or time.perf_counter() < end:
        for kind in (0, 1):
            for pair in pairs:
                start = time.perf_counter()
                pair[kind](x)
                times[kind].append(time.perf_counter() - start)
        rounds += 1
    return fast(times[0]), fast(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--isa", choices=import_native().available_isas())
    options = parser.parse_args()
    native = import_native()
    isa = options.isa or native.available_isas()[-1]
    print(f"isa {isa}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    print_calibration()
    for name in [options.dtype] if options.dtype else ["float32", "bfloat16"]:
        dtype: torch.dtype = getattr(torch, name)
        print(f"\n{name:9}{'T':>5}{'native':>12}{'torch':>12}{'ratio':>8}{'GB/s':>8}{'GFLOP/s':>9}")
        for layer, (inputs, outputs) in SHAPES.items():
            size = inputs * outputs * dtype.itemsize
            weights = [
                torch.randn(outputs, inputs).to(dtype) for _ in range(-(-COLD_BYTES // size))
            ]
            pairs: list[tuple[Linear, Linear]] = [
                (NativeLinear(PackedMatrix.of(native, w), None, isa), PlainLinear(w))
                for w in weights
            ]
            for rows in ROWS:
                x = torch.randn(rows, inputs).to(dtype)
                torch.testing.assert_close(
                    pairs[0][0](x), F.linear(x, weights[0]), rtol=2e-2, atol=2e-2 * inputs**0.5
                )
                ours, theirs = measure(pairs[: 2 if rows > 64 else None], x)
                print(
                    f"{layer:9}{rows:5}{ours * 1e6:9.0f} us{theirs * 1e6:9.0f} us"
                    f"{ours / theirs:8.2f}{size / ours / 1e9:8.1f}"
                    f"{2 * rows * inputs * outputs / ours / 1e9:9.0f}"
                )
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
