"""Attention of decode rows over a common prefix, read once for all of them.

Run: python benchmarks/bench_shared_prefix.py [--rows 16] [--prefix 4096] [--dtype float32|bfloat16]

Prints, interleaved in one run (medians, and the fastest tenth, which neighbours disturb less):
  matrix    the machine's matrix rate: torch.mm of [1024, 1024] by [1024, 1024] in the same dtype
  shared    the native kernel, each block of the prefix read once for all rows
  unshared  the same tables, every row on its own
Attention counts 4 D operations for each query head and position that it sees. Shapes are those
of SmolLM2-135M (H=9, G=3, D=64), blocks of 16 scattered over the pool.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from calibration import print_calibration
from pagedkv.attention import AttentionBatch, KVSpec
from pagedkv.attention.native import NativeBackend

HEADS, KV_HEADS, DIM, BLOCK, LAYERS = 9, 3, 64, 16, 4
OWN = 16  # positions of each row after the prefix


def batch_of(rows: int, prefix: int) -> tuple[AttentionBatch, int]:
    """Decode rows with `prefix` positions in common and a block of their own; blocks in all."""
    common, own = prefix // BLOCK, OWN // BLOCK
    num_blocks = common + rows * own
    ids = (np.random.default_rng(0).permutation(num_blocks) + 1).astype(np.int32)
    tables = np.empty((rows, common + own), np.int32)
    tables[:, :common] = ids[:common]
    tables[:, common:] = ids[common:].reshape(rows, own)
    batch = AttentionBatch(
        np.ones(rows, np.int32),
        np.full(rows, prefix + OWN, np.int32),
        tables,
        tables[:, -1].astype(np.int64) * BLOCK + BLOCK - 1,
    )
    return batch, num_blocks


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=4096, help="a multiple of the block size, 16")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    if options.rows < 1 or options.prefix < 0 or options.prefix % BLOCK:
        parser.error(f"--rows must be at least 1, --prefix a multiple of {BLOCK}")
    dtype = getattr(torch, options.dtype)
    batch, num_blocks = batch_of(options.rows, options.prefix)
    backend = NativeBackend(KVSpec(LAYERS, HEADS, KV_HEADS, DIM, num_blocks, BLOCK, dtype))
    content = torch.randn(num_blocks, LAYERS, 2, BLOCK, KV_HEADS, DIM).to(dtype)
    backend.write_blocks(np.arange(1, num_blocks + 1, dtype=np.int32), content)
    q = torch.randn(options.rows, HEADS, DIM).to(dtype)
    k, v = torch.randn(2, options.rows, KV_HEADS, DIM).to(dtype)
    a, b = torch.randn(2, 1024, 1024).to(dtype)
    product = torch.empty(1024, 1024, dtype=dtype)
    shared, unshared = backend.plan(batch), backend.plan(batch, share=False)

    def attend(plan: object) -> None:
        for layer in range(LAYERS):
            backend.run(plan, layer, q, k, v)

    calls: dict[str, tuple[float, Callable[[], object]]] = {}  # operations, call
    attention = 4.0 * DIM * HEADS * int(batch.context_lens.sum()) * LAYERS
    calls["matrix"] = 2.0 * 1024**3, lambda: torch.mm(a, b, out=product)
    calls["shared"] = attention, lambda: attend(shared)
    calls["unshared"] = attention, lambda: attend(unshared)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _, call in calls.values():
        call()
    end = time.perf_counter() + options.seconds
    while time.perf_counter() < end or len(times["matrix"]) < 10:
        for name, (_, call) in calls.items():
            times[name].append(seconds(call))

    print_calibration()
    print(
        f"{torch.get_num_threads()} threads, isa {backend.isa}, {options.dtype}, {options.rows} "
        f"decode rows, prefix {options.prefix}, spans read once for all: {shared.num_shared_spans}"
    )
    print(f"{'':10}{'median':>18}{'fastest tenth':>24}")
    middle = {name: statistics.median(taken) for name, taken in times.items()}
    quick = {name: statistics.quantiles(taken, n=10)[0] for name, taken in times.items()}
    for name, (operations, _) in calls.items():
        rates = (operations / at[name] / 1e9 for at in (middle, quick))
        print(f"{name:10}" + "".join(f"{rate:10.1f} GFLOP/s     " for rate in rates))
    for label, at in (("median", middle), ("fastest tenth", quick)):
        rate = attention / at["shared"] / (calls["matrix"][0] / at["matrix"])
        print(
            f"{label}: {100 * rate:.0f} % of the matrix rate, "
            f"{at['unshared'] / at['shared']:.2f} times as fast as unshared"
        )


if __name__ == "__main__":
    main()
