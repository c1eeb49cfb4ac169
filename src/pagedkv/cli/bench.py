"""`pagedkv bench`: what a setting costs on this machine."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from pagedkv.bench.cache import decoding
from pagedkv.bench.rounds import in_turns
from pagedkv.cli.workload import TRACES_VARIABLE, find_trace
from pagedkv.errors import ConfigError
from pagedkv.simulation.block_sizes import Tradeoff, prompts_of, shared_prefixes, tradeoffs
from pagedkv.simulation.capacity import ModelShape
from pagedkv.simulation.trace import read_trace
from pagedkv.simulation.workload import make_trace

_HEADS, _SHAPE = 9, ModelShape(30, 3, 64, "float32")  # those of SmolLM2-135M
_SEQS, _STEPS, _SLOTS = 128, 30, 2**17  # decode steps of a round, in a full pool
_ROWS, _CONTEXT = 8, 2048  # of attention
_CACHE_ROUNDS, _ATTENTION_ROUNDS = 12, 100
_MAX_BLOCK_SIZE = 512
_REFERENCE = 16  # ratios are to this block size, or to the first where it is not asked for


@dataclass(frozen=True, slots=True)
class Times:
    """Of one block size; the ratios are to the block size of reference."""

    cache_us_per_token: float  # reserve and commit of a decoded token
    cache_ratio: float
    attention_gb_per_s: float  # of K and V read by decode rows
    attention_ratio: float


def block_size(
    trace: Annotated[
        Path | None,
        typer.Option(
            help=f"CSV or .jsonl file; a bare name is looked for in {TRACES_VARIABLE} too. "
            "Default: invented requests.",
            metavar="FILE",
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="Only the first so many.", metavar="INTEGER")] = 300,
    block_sizes: Annotated[
        str, typer.Option(help="Tokens a block, to be compared.", metavar="B,B,...")
    ] = "1,2,4,8,16,32,64,128,256",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Every block size on one table: memory, copies and hits, and what it costs in time.

    Waste, bytes and hit rates are exact. Times are lower quartiles of rounds in which all block
    sizes take turns; compare them with each other, not with those of another run.
    """
    try:
        sizes = sorted({int(item) for item in block_sizes.split(",")})
    except ValueError:
        raise ConfigError(f"--block-sizes={block_sizes!r} must be numbers, such as 8,16") from None
    for size in sizes:
        if not 1 <= size <= _MAX_BLOCK_SIZE:
            raise ConfigError(f"block size {size}: give 1 to {_MAX_BLOCK_SIZE} to be measured")
    if trace is None:
        wanted = make_trace(requests, 1.0, 256, 128)
    else:
        wanted = read_trace(find_trace(trace)).first(requests)
    invented = wanted.block_ids is None
    prompts = shared_prefixes() if invented else prompts_of(wanted)
    exact = tradeoffs(wanted, prompts, sizes, _SHAPE.token_bytes)
    backend, times = _measure(sizes)
    if as_json:
        rows = {size: asdict(exact[size]) | asdict(times[size]) for size in sizes}
        facts = {"requests": len(wanted), "prompts": len(prompts), "prompts_invented": invented}
        print(json.dumps({"block_sizes": rows, "attention_backend": backend} | facts))
        return
    console = Console(highlight=False)
    console.print(_table(exact, times))
    console.print(
        f"{len(wanted):,} requests; waste of their reserved slots; bytes of the block table each; "
        "copy: bytes of K/V when the tail of a prompt is copied, SmolLM2-135M in float32; hits: of "
        f"{len(prompts):,} {'invented ' if invented else ''}prompts, with partly shared blocks and "
        f"(full) without; cache: reserve and commit in decode steps of {_SEQS} sequences; "
        f"attention: K/V read by backend {backend}. Beside the times their ratio to block size "
        f"{_reference(sizes)}."
    )


def _table(exact: Mapping[int, Tradeoff], times: Mapping[int, Times]) -> Table:
    # Without a frame all columns fit into 80 characters.
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    names = ("block", "waste", "table B", "copy KiB", "hits", "full", "cache us", "", "GB/s", "")
    for name in names:
        table.add_column(name, justify="right")
    for size, facts in exact.items():
        taken = times[size]
        table.add_row(
            str(size),
            f"{facts.tail_waste:.2%}",
            f"{facts.table_bytes:,.0f}",
            f"{facts.copy_bytes / 1024:,.0f}",
            f"{facts.hit_rate:.1%}",
            f"{facts.full_block_hit_rate:.1%}",
            f"{taken.cache_us_per_token:.2f}",
            f"x{taken.cache_ratio:.2f}",
            f"{taken.attention_gb_per_s:.1f}",
            f"x{taken.attention_ratio:.2f}",
        )
    return table


def _reference(sizes: Sequence[int]) -> int:
    return _REFERENCE if _REFERENCE in sizes else sizes[0]


def _measure(sizes: Sequence[int]) -> tuple[str, dict[int, Times]]:
    """The attention backend, and what each block size takes."""
    with ExitStack() as stack:
        steps = {size: stack.enter_context(_decode_steps(size)) for size in sizes}
        cache = _quartiles(in_turns(steps, rounds=_CACHE_ROUNDS))
    backend, calls = _attention(sizes)
    attention = _quartiles(in_turns(calls, rounds=_ATTENTION_ROUNDS))
    layer_bytes = _ROWS * _CONTEXT * _SHAPE.token_bytes / _SHAPE.layers
    reference = _reference(sizes)
    return backend, {
        size: Times(
            cache[size] / (_STEPS * _SEQS) * 1e6,
            cache[size] / cache[reference],
            layer_bytes / attention[size] / 1e9,
            attention[reference] / attention[size],
        )
        for size in sizes
    }


def _quartiles(taken: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """The lower ones: neighbours disturb a run in one direction."""
    return {size: statistics.quantiles(seconds, n=4)[0] for size, seconds in taken.items()}


@contextmanager
def _decode_steps(size: int) -> Iterator[Callable[[], None]]:
    """Decode steps in a pool so full of cached blocks that every new block evicts one."""
    manager, seqs = decoding(_SLOTS // size, size, _SEQS, longest=4096)
    ones = [1] * _SEQS
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 32_000, (_STEPS, _SEQS, 1), dtype=np.int32).tolist()

    def steps() -> None:
        for tokens in drawn:
            manager.reserve(seqs, ones)
            manager.commit(seqs, tokens)

    yield steps
    for seq in seqs:
        manager.close(seq)


def _attention(sizes: Sequence[int]) -> tuple[str, dict[int, Callable[[], object]]]:
    """One layer's attention of decode rows over blocks that lie in no order."""
    import torch  # takes seconds

    from pagedkv.attention import AttentionBatch, KVSpec
    from pagedkv.attention.backends import make_backend

    heads, dim = _SHAPE.kv_heads, _SHAPE.head_dim
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(_ROWS, _HEADS, dim, generator=generator)
    k, v = torch.randn(2, _ROWS, heads, dim, generator=generator)
    name = ""
    calls: dict[int, Callable[[], object]] = {}
    for size in sizes:
        width = -(-_CONTEXT // size)
        ids = np.random.default_rng(0).permutation(_ROWS * width).astype(np.int32) + 1
        tables = ids.reshape(_ROWS, width)
        batch = AttentionBatch(
            np.ones(_ROWS, np.int32),
            np.full(_ROWS, _CONTEXT, np.int32),
            tables,
            tables[:, -1].astype(np.int64) * size + (_CONTEXT - 1) % size,
        )
        backend = make_backend("auto", KVSpec(1, _HEADS, heads, dim, len(ids), size, torch.float32))
        content = torch.randn(len(ids), 1, 2, size, heads, dim, generator=generator)
        backend.write_blocks(ids, content)
        calls[size] = partial(backend.run, backend.plan(batch), 0, q, k, v)
        name = backend.name
    return name, calls
