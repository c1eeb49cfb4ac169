"""What does the block table cost, and how far is attention from what the machine can give?

Run: python benchmarks/bench_attention.py [--dtype float32|bfloat16]

First what bounds attention, interleaved in one run: memory that is read (a sum by all
threads, in small and in huge pages), the rate of the native linear layer at 512 rows, and beside
them, in the same units, decode rows over ordered and shuffled tables, decode rows over a common
prefix, the prefill of one prompt (the operations of what a token sees) and one sequence alone.
Then for each shape the same K/V is attended to in three ways, interleaved, medians of all rounds:
  table   the native kernel, blocks of 16 scattered over the pool
  extent  the native kernel, one block for the whole context: no table to speak of
  gather  copy to contiguous scratch, then torch's SDPA
One figure is one step: every layer of SmolLM2-135M (30 layers, H=9, G=3, D=64); "mixed" is one
row of 1,900 tokens and 31 of 10. A calibration loop of the same run stands beside the figures, so
that runs on other machines can be compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from calibration import print_calibration
from pagedkv.attention import KVSpec
from pagedkv.attention.native import import_native
from pagedkv.bench.attention import Shape, attention_step, filled_backend
from pagedkv.bench.rounds import fast, in_turns
from pagedkv.engine.measure import mapped_ones
from pagedkv.models.linear import NativeLinear
from pagedkv.models.packed import PackedMatrix

LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 30, 9, 3, 64, 16
MAX_STORE_BYTES = 600 * 2**20  # a larger store keeps fewer layers and goes round them
SHAPES = [  # name, new tokens a row, context of each row
    ("decode", 1, [512] * 1),
    ("decode", 1, [512] * 8),
    ("decode", 1, [512] * 32),
    ("decode", 1, [2048] * 1),
    ("decode", 1, [2048] * 8),
    ("decode", 1, [2048] * 32),
    ("mixed", 1, [1900, *[10] * 31]),
    ("prefill", 512, [512]),
    ("prefill", 512, [2048]),
]
READ_BYTES = 2**28
LINEAR = (512, 1024, 2048)  # rows, inputs, outputs
DECODE = Shape()
BOUNDED = {  # what bounds it, and its shape; "shuffled" in its name: its blocks lie anyhow
    "decode, ordered": ("read", DECODE),
    "decode, shuffled": ("read", DECODE),
    "prefix of 16, shuffled": (
        "linear",
        Shape(batch_size=16, context_len=4112, shared_prefix_len=4096, num_layers=4),
    ),
    "prefill, shuffled": (
        "linear",
        Shape(batch_size=1, context_len=1900, query_len=1900, num_layers=2),
    ),
    **{
        f"alone at {n}, shuffled": ("read", Shape(batch_size=1, context_len=n, num_layers=30))
        for n in (128, 512, 1024, 4096)
    },
}


def spec_of(contexts: list[int], block_size: int, layers: int, dtype: torch.dtype) -> KVSpec:
    blocks = sum(-(-context // block_size) for context in contexts)
    return KVSpec(layers, HEADS, KV_HEADS, DIM, blocks, block_size, dtype)


def layers_in_store(contexts: list[int], block_sizes: list[int], dtype: torch.dtype) -> int:
    """The same for all that are compared: as many as the largest of their stores may keep."""
    largest = max(
        spec.num_blocks * spec.block_bytes
        for spec in (spec_of(contexts, size, 1, dtype) for size in block_sizes)
    )
    return min(LAYERS, max(1, MAX_STORE_BYTES // largest))


def step_of(name: str, new: int, contexts: list[int], spec: KVSpec) -> Callable[[], None]:
    """A step of all layers over tables [rows, w] scattered over the pool."""
    ids = np.random.default_rng(0).permutation(spec.num_blocks) + 1
    counts = [-(-context // spec.block_size) for context in contexts]
    tables = np.zeros((len(contexts), max(counts)), np.int32)
    for row, own in zip(tables, np.split(ids, np.cumsum(counts)[:-1]), strict=True):
        row[: len(own)] = own
    return attention_step(filled_backend(name, spec), tables, contexts, new, LAYERS)


def print_bounds(dtype: torch.dtype, seconds: float) -> None:
    small = mapped_ones(READ_BYTES, "MADV_NOHUGEPAGE")
    huge = mapped_ones(READ_BYTES, "MADV_HUGEPAGE")
    rows, inputs, outputs = LINEAR
    native = import_native()
    linear = NativeLinear(PackedMatrix.of(native, torch.randn(outputs, inputs).to(dtype)))
    x = torch.randn(rows, inputs).to(dtype)
    calls: dict[str, Callable[[], object]] = {
        "read, small pages": small.sum,
        "read, huge pages": huge.sum,
        "linear": lambda: linear(x),
    }
    amounts = {
        "read, small pages": READ_BYTES,
        "read, huge pages": READ_BYTES,
        "linear": 2 * rows * inputs * outputs,
    }
    for name, (bound, shape) in BOUNDED.items():
        ids = np.arange(1, shape.num_blocks + 1, dtype=np.int32)
        if "shuffled" in name:
            ids = np.random.default_rng(0).permutation(ids)
        backend = filled_backend("native", shape.spec(dtype))
        tables = shape.tables(ids)
        calls[name] = attention_step(backend, tables, shape.context_len, shape.query_len)
        amount = shape.layer_bytes(dtype) if bound == "read" else shape.layer_operations
        amounts[name] = amount * shape.num_layers
    taken = in_turns(calls, seconds=seconds, rounds=15)
    for label, pick in (("medians", statistics.median), ("fastest tenths", fast)):
        print(f"{label} of {len(taken['linear'])} rounds")
        print_rates({name: amounts[name] / pick(taken[name]) / 1e9 for name in calls})


def print_rates(rates: dict[str, float]) -> None:
    """rates: GB/s or GFLOP/s."""
    for name, rate in rates.items():
        if name not in BOUNDED:
            print(f"  {name:24}{rate:8.1f} {'GFLOP/s' if name == 'linear' else 'GB/s'}")
        elif BOUNDED[name][0] == "linear":
            print(f"  {name:24}{rate:8.1f} GFLOP/s, {rate / rates['linear']:.0%} of linear")
        else:
            shares = [f"{rate / rates[f'read, {pages} pages']:.0%}" for pages in ("small", "huge")]
            print(f"  {name:24}{rate:8.1f} GB/s, {' and '.join(shares)} of the reads above")
    slower = rates["decode, ordered"] / rates["decode, shuffled"] - 1
    print(f"  a shuffled table takes {slower:.1%} longer than an ordered one")


def seconds(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each shape")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    print_calibration()
    print(f"{torch.get_num_threads()} threads")
    print_bounds(dtype, 5 * options.seconds)
    print(f"{options.dtype}, one step of {LAYERS} layers, milliseconds (median)")
    print(
        f"{'':8}{'rows':>5}{'context':>9}{'table':>9}{'extent':>9}{'gather':>9}"
        f"{'table/extent':>14}{'gather/table':>14}"
    )
    for name, new, contexts in SHAPES:
        longest = max(contexts)
        whole = -(-longest // BLOCK) * BLOCK
        layers = layers_in_store(contexts, [BLOCK, whole], dtype)
        scattered = spec_of(contexts, BLOCK, layers, dtype)
        steps = [
            step_of("native", new, contexts, scattered),
            step_of("native", new, contexts, spec_of(contexts, whole, layers, dtype)),
            step_of("gather", new, contexts, scattered),
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
            f"{name:8}{len(contexts):5}{longest:9}{table:9.2f}{extent:9.2f}{gather:9.2f}"
            f"{table / extent:14.3f}{gather / table:14.2f}"
        )


if __name__ == "__main__":
    main()
