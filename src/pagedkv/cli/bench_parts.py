"""`pagedkv bench attention` and `pagedkv bench cache`: one part of the engine alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from pagedkv.cli import engine_options as options
from pagedkv.cli.bench_show import calibration_facts, limit_facts, print_facts
from pagedkv.cli.units import read_count
from pagedkv.errors import ConfigError

_COUNT, _NUMBER = "INTEGER", "NUMBER"
_DTYPES = ("float32", "bfloat16")


def attention(
    batch_size: Annotated[
        int, typer.Option(help="Rows of the step.", parser=read_count, metavar=_COUNT)
    ] = 64,
    context_len: Annotated[
        int, typer.Option(help="Tokens that each row sees.", parser=read_count, metavar=_COUNT)
    ] = 1024,
    query_len: Annotated[
        int,
        typer.Option(
            help="New ones of them; 1 is decode, more a prefill chunk.",
            parser=read_count,
            metavar=_COUNT,
        ),
    ] = 1,
    shared_prefix_len: Annotated[
        int,
        typer.Option(
            help="First ones of them, in blocks that all rows share.",
            parser=read_count,
            metavar=_COUNT,
        ),
    ] = 0,
    block_size: options.BlockSize = 16,
    num_heads: Annotated[int, typer.Option(help="Query heads.", metavar=_COUNT)] = 9,
    num_kv_heads: Annotated[int, typer.Option(help="K/V heads.", metavar=_COUNT)] = 3,
    head_dim: Annotated[int, typer.Option(help="Size of a head.", metavar=_COUNT)] = 64,
    num_layers: Annotated[
        int, typer.Option(help="K/V that are visited in turn.", metavar=_COUNT)
    ] = 8,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.", metavar="TEXT")] = "bfloat16",
    backend: options.Backend = "auto",
    seconds: Annotated[float, typer.Option(help="How long to measure.", metavar=_NUMBER)] = 3.0,
    as_json: options.Json = False,
) -> None:
    """Attention over the block table, its blocks in order and shuffled, beside the machine.

    Times are those of one layer. Both tables, a read of memory and a product of matrices take
    turns, and the fastest tenth of each counts.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"--dtype={dtype!r}: use one of {', '.join(_DTYPES)}")
    import torch

    from pagedkv.bench.attention import Shape, TableTimes, measure_attention
    from pagedkv.bench.calibration import calibrate
    from pagedkv.engine.build import set_threads
    from pagedkv.engine.machine import machine_memory

    shape = Shape(
        batch_size,
        context_len,
        query_len,
        shared_prefix_len,
        block_size,
        num_heads,
        num_kv_heads,
        head_dim,
        num_layers,
    )
    shape.check()
    threads = set_threads()
    kind: torch.dtype = getattr(torch, dtype)
    memory = machine_memory().available // 2
    times = measure_attention(shape, kind, backend, seconds=seconds, memory=memory)
    calibration = calibrate()
    facts = {
        "shape": asdict(shape),
        "dtype": dtype,
        "attention_backend": times.backend,
        "num_threads": threads,
        "rounds": times.rounds,
        "shared_spans": times.shared_spans,
        "layer_bytes": shape.layer_bytes(kind),
        "layer_operations": shape.layer_operations,
        "ordered": asdict(times.ordered),
        "shuffled": asdict(times.shuffled),
        "shuffled_ratio": times.shuffled.seconds / times.ordered.seconds,
        "calibration": calibration_facts(calibration),
        "limits": limit_facts(times.limits),
    }

    def row(name: str, taken: TableTimes) -> tuple[str, ...]:
        return (
            name,
            f"{taken.seconds * 1e6:,.0f}",
            f"{taken.gb_per_s:.1f}",
            f"{taken.bandwidth_share:.0%}",
            f"{taken.gflop_per_s:.1f}",
            f"{taken.matrix_share:.0%}",
        )

    print_facts(
        facts,
        [row("ordered", times.ordered), row("shuffled", times.shuffled)],
        (
            f"{batch_size} rows of {query_len} new tokens, {context_len:,} seen by each, "
            f"{shared_prefix_len:,} shared ({times.shared_spans} spans read once for several); "
            f"blocks of {block_size}, {num_heads}/{num_kv_heads} heads of {head_dim}, {dtype}, "
            f"backend {times.backend}, {threads} threads; {times.rounds} rounds of {num_layers} "
            f"layers; shuffled takes {facts['shuffled_ratio']:.2f} times as long",
            calibration,
            times.limits,
        ),
        as_json,
        ("table", "us a layer", "GB/s", "of read", "GFLOP/s", "of matrix"),
    )


def cache(
    num_seqs: Annotated[
        int, typer.Option(help="Sequences that decode.", parser=read_count, metavar=_COUNT)
    ] = 256,
    num_blocks: Annotated[
        int, typer.Option(help="Blocks of the pool.", parser=read_count, metavar=_COUNT)
    ] = 32_768,
    block_size: options.BlockSize = 16,
    prompt_len: Annotated[
        int,
        typer.Option(
            help="Tokens of the cached prompt that is opened.", parser=read_count, metavar=_COUNT
        ),
    ] = 1024,
    rounds: Annotated[
        int, typer.Option(help="Each of as many steps as a block has slots.", metavar=_COUNT)
    ] = 20,
    as_json: options.Json = False,
) -> None:
    """What block management takes, without a model: decode steps, prefix hits, forks.

    The pool is full of cached blocks, so that every new block evicts one. The fastest tenth of
    the rounds counts.
    """
    from pagedkv.bench.cache import measure_cache
    from pagedkv.bench.calibration import calibrate

    times = measure_cache(num_seqs, num_blocks, block_size, rounds=rounds, prompt_len=prompt_len)
    calibration = calibrate()
    facts = {
        "num_seqs": num_seqs,
        "num_blocks": num_blocks,
        "block_size": block_size,
        "prompt_len": prompt_len,
        "rounds": rounds,
        **asdict(times),
        "calibration": calibration_facts(calibration),
    }
    rows = [
        ("decode step, a sequence", f"{times.decode_us:.2f} us"),
        ("decode step, all", f"{times.decode_us * num_seqs:,.0f} us"),
        (f"open, {times.cached_tokens:,} of {prompt_len:,} cached", f"{times.open_us:.0f} us"),
        ("close of it", f"{times.close_us:.0f} us"),
        ("fork and its first token", f"{times.fork_us:.0f} us"),
    ]
    print_facts(
        facts,
        rows,
        (
            f"{num_seqs:,} sequences, {num_blocks:,} blocks of {block_size}, all held or cached; "
            f"{times.evicted_blocks:,} evicted meanwhile",
            calibration,
        ),
        as_json,
    )
