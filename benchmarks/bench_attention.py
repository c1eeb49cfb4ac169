"""What does the block table cost? Attention through a scattered table against one extent.

Run: python benchmarks/bench_attention.py [--dtype float32|bfloat16]

For each shape the same K/V is attended to in three ways, interleaved, medians of all rounds:
  table   the native kernel, blocks of 16 scattered over the pool
  extent  the native kernel, one block as long as the context: no table to speak of
  gather  copy to contiguous scratch, then torch's SDPA
One figure is one step: every layer of SmolLM2-135M (30 layers, H=9, G=3, D=64). A calibration
loop of the same run stands beside the figures, so that runs on other machines can be compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from pagedkv.attention import AttentionBackend, AttentionBatch, KVSpec, make_backend

LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 30, 9, 3, 64, 16
MAX_STORE_BYTES = 600 * 2**20  # a larger store keeps fewer layers and goes round them
SHAPES = [  # name, rows, new tokens a row, context
    ("decode", 1, 1, 512),
    ("decode", 8, 1, 512),
    ("decode", 32, 1, 512),
    ("decode", 1, 1, 2048),
    ("decode", 8, 1, 2048),
    ("decode", 32, 1, 2048),
    ("prefill", 1, 512, 512),
    ("prefill", 1, 512, 2048),
]


def make(
    name: str, rows: int, context: int, block_size: int, dtype: torch.dtype
) -> tuple[AttentionBackend, np.ndarray]:
    """A backend full of random K/V, and tables [rows, w] scattered over its pool."""
    width = -(-context // block_size)
    layer_bytes = KVSpec(1, HEADS, KV_HEADS, DIM, rows * width, block_size, dtype).block_bytes
    layers = min(LAYERS, max(1, MAX_STORE_BYTES // (layer_bytes * rows * width)))
    spec = KVSpec(layers, HEADS, KV_HEADS, DIM, rows * width, block_size, dtype)
    backend = make_backend(name, spec)
    every = np.arange(1, spec.num_blocks + 1, dtype=np.int32)
    for ids in np.array_split(every, max(1, spec.num_blocks // 64)):
        content = torch.randn(1, layers, 2, block_size, KV_HEADS, DIM).to(dtype)
        backend.write_blocks(ids, content.repeat(len(ids), 1, 1, 1, 1, 1))
    ids = np.random.default_rng(0).permutation(spec.num_blocks) + 1
    return backend, ids.astype(np.int32).reshape(rows, width)


def step_of(
    name: str, rows: int, new: int, context: int, block_size: int, dtype: torch.dtype
) -> Callable[[], None]:
    backend, tables = make(name, rows, context, block_size, dtype)
    positions = np.arange(context - new, context)
    slots = tables[:, positions // block_size].astype(np.int64) * block_size
    batch = AttentionBatch(
        np.full(rows, new, np.int32),
        np.full(rows, context, np.int32),
        tables,
        (slots + positions % block_size).reshape(-1),
    )
    tokens = rows * new
    q = torch.randn(tokens, HEADS, DIM).to(dtype)
    k, v = torch.randn(2, tokens, KV_HEADS, DIM).to(dtype)

    def step() -> None:
        plan = backend.plan(batch)
        for layer in range(LAYERS):
            backend.run(plan, layer % backend.spec.num_layers, q, k, v)

    return step


def seconds(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def python_loop() -> None:
    total = 0
    for i in range(1_000_000):
        total += i


def calibrate() -> None:
    source = torch.zeros(256 * 2**20, dtype=torch.uint8)
    target = torch.ones_like(source)
    copy = statistics.median(seconds(lambda: target.copy_(source)) for _ in range(5))
    loop = statistics.median(seconds(python_loop) for _ in range(5))
    print(
        f"calibration: copy of 256 MB {copy * 1e3:.1f} ms ({0.268 / copy:.1f} GB/s), "
        f"1,000,000 turns of a Python loop {loop * 1e3:.1f} ms, {torch.get_num_threads()} threads"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each shape")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    calibrate()
    print(f"{options.dtype}, one step of {LAYERS} layers, milliseconds (median)")
    print(
        f"{'':8}{'rows':>5}{'context':>9}{'table':>9}{'extent':>9}{'gather':>9}"
        f"{'table/extent':>14}{'gather/table':>14}"
    )
    for name, rows, new, context in SHAPES:
        steps = [
            step_of("native", rows, new, context, BLOCK, dtype),
            step_of("native", rows, new, context, context, dtype),
            step_of("gather", rows, new, context, BLOCK, dtype),
        ]
        for step in steps:
            step()
        times: list[list[float]] = [[] for _ in steps]
        end = time.perf_counter() + options.seconds
        while time.perf_counter() < end or len(times[0]) < 3:
            for step, taken in zip(steps, times, strict=True):
                taken.append(seconds(step))
        table, extent, gather = (statistics.median(taken) * 1e3 for taken in times)
        print(
            f"{name:8}{rows:5}{context:9}{table:9.2f}{extent:9.2f}{gather:9.2f}"
            f"{table / extent:14.3f}{gather / table:14.2f}"
        )


if __name__ == "__main__":
    main()
