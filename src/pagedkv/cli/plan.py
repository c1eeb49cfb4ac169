"""`pagedkv plan`: what K/V take, how many sequences fit, when copying or a split pays."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pagedkv.cli.costs import Line
from pagedkv.cli.plan_split import SplitOptions, plan_split, print_split, read_rates, split_facts
from pagedkv.cli.units import format_size, format_time
from pagedkv.engine.sizes import parse_bytes
from pagedkv.errors import ConfigError
from pagedkv.simulation.capacity import Capacity, ModelShape, Recovery

_BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
_LENGTHS = (128, 512, 2048, 8192, 32768)


def plan(
    model: Annotated[
        str | None,
        typer.Option(help="Embedded model, folder, GGUF file or hub id.", metavar="TEXT"),
    ] = None,
    model_shape: Annotated[
        str | None,
        typer.Option(help="Instead of a model: layers,K/V heads,head dim.", metavar="L,G,D"),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of K/V. Default: the model's, else float16.", metavar="TEXT"),
    ] = None,
    memory: Annotated[
        str, typer.Option(help="Memory of the pool: bytes, 512MiB, 2GB.", metavar="SIZE")
    ] = "40GiB",
    block_size: Annotated[int, typer.Option(help="Tokens a block.", metavar="INTEGER")] = 16,
    reserve: Annotated[
        int,
        typer.Option(help="Tokens a contiguous allocator sets aside.", metavar="INTEGER"),
    ] = 2048,
    mean_output: Annotated[
        int,
        typer.Option(help="Tokens that a sequence holds on average.", metavar="INTEGER"),
    ] = 200,
    parameters: Annotated[
        float | None,
        typer.Option(help="Of the model, for swap against recompute.", metavar="NUMBER"),
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(
            help="Query heads. Default: the model's, else the K/V heads.", metavar="INTEGER"
        ),
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option(help="Operations a second that a prefill reaches.", metavar="NUMBER"),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="Bytes a second to host memory: 25GB, 12GiB.", metavar="SIZE"),
    ] = None,
    piece: Annotated[
        str | None,
        typer.Option(
            help="Bytes that are copied in one piece. Default: a block, all layers together.",
            metavar="SIZE",
        ),
    ] = None,
    piece_us: Annotated[
        float | None,
        typer.Option(help="Microseconds more for each piece copied. Default: 0.", metavar="NUMBER"),
    ] = None,
    ttft: Annotated[
        float | None,
        typer.Option(help="Split or not: seconds to the first token.", metavar="NUMBER"),
    ] = None,
    tpot: Annotated[
        float | None,
        typer.Option(
            help="Split or not: seconds between tokens, mean of a request.", metavar="NUMBER"
        ),
    ] = None,
    share: Annotated[
        float, typer.Option(help="Of the requests that both are for.", metavar="NUMBER")
    ] = 0.9,
    trace: Annotated[
        Path | None,
        typer.Option(help="Split or not: of these requests, see simulate.", metavar="FILE"),
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            help="Instead of all others: measured requests/s of a device that prefills alone, "
            "decodes alone, does both.",
            metavar="P,D,BOTH",
        ),
    ] = None,
    devices: Annotated[int, typer.Option(help="Most devices of a split.", metavar="INTEGER")] = 8,
    network_gb: Annotated[
        float, typer.Option(help="GB/s of a device's link to the others.", metavar="NUMBER")
    ] = 25.0,
    max_num_seqs: Annotated[
        int, typer.Option(help="Most sequences that a device decodes at once.", metavar="INTEGER")
    ] = 256,
    step_ms: Annotated[
        float | None,
        typer.Option(help="Milliseconds of any step, see simulate serve.", metavar="NUMBER"),
    ] = None,
    token_us: Annotated[
        float | None,
        typer.Option(help="Microseconds more for each token.", metavar="NUMBER"),
    ] = None,
    context_us: Annotated[
        float | None,
        typer.Option(help="Microseconds more for each token of context read.", metavar="NUMBER"),
    ] = None,
    perf_table: Annotated[
        Path | None,
        typer.Option(
            help="Instead: costs from a table, see simulate serve. --model is as the table calls "
            "it then, and --model-shape is needed too.",
            metavar="FILE",
        ),
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="As the table calls it.", metavar="TEXT")
    ] = None,
    tp: Annotated[
        int | None, typer.Option(help="Tensor parallelism, of the table.", metavar="INTEGER")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """What a model's K/V take, how many sequences fit, and when copying beats computing.

    With --ttft, --tpot and --trace: whether prefill and decode should have devices of their own,
    how many each, and at what goodput a device. Pool and model are those of one device.
    """
    split = SplitOptions(
        ttft,
        tpot,
        share,
        trace,
        devices,
        network_gb,
        max_num_seqs,
        Line(step_ms, token_us, context_us),
        perf_table,
        model if perf_table is not None else None,
        hardware,
        tp,
    )
    if rates is not None:
        if split.asked or model is not None or model_shape is not None:
            raise ConfigError("--rates need neither a model nor a trace: leave them out")
        facts = split_facts(read_rates(rates), devices)
        if as_json:
            print(json.dumps(facts))
        else:
            print_split(facts, Console(highlight=False))
        return
    shape, found_heads, found_parameters = _shape(
        model if perf_table is None else None, model_shape, dtype
    )
    capacity = Capacity(shape, parse_bytes(memory, "--memory"), block_size, reserve, mean_output)
    recovery = None
    if link is not None or flops is not None:
        recovery = _recovery(
            shape,
            found_heads if heads is None else heads,
            found_parameters if parameters is None else parameters,
            flops,
            link,
        )
        block = block_size * shape.token_bytes
        recovery = replace(
            recovery,
            piece_bytes=float(block if piece is None else parse_bytes(piece, "--piece")),
            piece_seconds=(piece_us or 0.0) / 1e6,
        )
    elif piece is not None or piece_us is not None:
        raise ConfigError("--piece and --piece-us are about copying: give --link and --flops too")
    planned = plan_split(split, capacity) if split.asked else None
    if as_json:
        found = _facts(capacity, recovery)
        print(json.dumps(found if planned is None else found | {"disaggregation": planned}))
        return
    console = Console(highlight=False)
    console.print(_capacity_table(capacity))
    console.print(_waste_table(capacity))
    if recovery is not None:
        console.print(_recovery_table(recovery))
    if planned is not None:
        print_split(planned, console)


def _shape(
    model: str | None, text: str | None, dtype: str | None
) -> tuple[ModelShape, int, float | None]:
    """The shape, its query heads, and its parameters where they are known."""
    if model is not None and text is None:
        from pagedkv.models.shape import read_shape  # torch takes seconds to import

        facts = read_shape(model)
        own = dtype or facts.dtype or "float16"
        shape = ModelShape(facts.layers, facts.kv_heads, facts.head_dim, own)
        return shape, facts.heads, facts.parameters
    if text is not None and model is None:
        try:
            layers, kv_heads, head_dim = map(int, text.split(","))
        except ValueError:
            raise ConfigError(
                f"--model-shape={text!r} must be layers,K/V heads,head dim, such as 32,8,128"
            ) from None
        return ModelShape(layers, kv_heads, head_dim, dtype or "float16"), kv_heads, None
    raise ConfigError("give either --model or --model-shape layers,K/V heads,head dim")


def _recovery(
    shape: ModelShape, heads: int, parameters: float | None, flops: float | None, link: str | None
) -> Recovery:
    if link is None or flops is None or parameters is None:
        given = {"--link": link, "--flops": flops, "--parameters": parameters}
        missing = next(option for option, value in given.items() if value is None)
        raise ConfigError(f"{missing} is needed too, to compare swap and recompute")
    return Recovery(
        shape, parameters, heads * shape.head_dim, flops, float(parse_bytes(link, "--link"))
    )


def _facts(capacity: Capacity, recovery: Recovery | None) -> dict[str, Any]:
    facts: dict[str, Any] = asdict(capacity) | {
        "token_bytes": capacity.shape.token_bytes,
        "num_blocks": capacity.num_blocks,
        "reservation_bytes": capacity.reservation_bytes,
        "resident_reserved": capacity.resident_reserved,
        "resident_paged": capacity.resident_paged,
        "reserved_waste": capacity.reserved_waste,
        "tail_waste": {size: capacity.tail_waste(size) for size in _BLOCK_SIZES},
    }
    if recovery is not None:
        facts["recovery"] = [
            {
                "tokens": tokens,
                "swap_seconds": recovery.swap_seconds(tokens),
                "recompute_seconds": recovery.recompute_seconds(tokens),
                "crossover_bytes_per_second": _finite(recovery.crossover_link(tokens)),
            }
            for tokens in _LENGTHS
        ]
    return facts


def _capacity_table(capacity: Capacity) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    shape = capacity.shape
    for name, value in (
        (
            "model",
            f"{shape.layers} layers, {shape.kv_heads} K/V heads of {shape.head_dim}, {shape.dtype}",
        ),
        ("K/V a token", format_size(shape.token_bytes)),
        (
            "a block",
            f"{format_size(shape.token_bytes * capacity.block_size)}, {capacity.block_size} tokens",
        ),
        ("blocks in the pool", f"{capacity.num_blocks:,} in {format_size(capacity.memory)}"),
        (
            f"a reservation of {capacity.reserve:,} tokens",
            f"{format_size(capacity.reservation_bytes)}, {capacity.reserved_waste:.1%} of it "
            f"unused at {capacity.mean_tokens:,} tokens",
        ),
        ("resident sequences, reserved", f"{capacity.resident_reserved:,}"),
        ("resident sequences, paged", f"{capacity.resident_paged:,}"),
    ):
        table.add_row(name, value)
    return table


def _waste_table(capacity: Capacity) -> Table:
    table = Table(title=f"empty slots of held blocks, {capacity.mean_tokens:,} tokens a sequence")
    table.add_column("block size", justify="right")
    table.add_column("waste", justify="right")
    table.add_column("a block", justify="right")
    for size in _BLOCK_SIZES:
        block = format_size(size * capacity.shape.token_bytes)
        table.add_row(str(size), f"{capacity.tail_waste(size):.1%}", block)
    return table


def _recovery_table(recovery: Recovery) -> Table:
    table = Table(title=f"resuming a preempted sequence, link of {format_size(recovery.link)}/s")
    for name in ("tokens", "swap", "recompute", "faster", "swap wins above"):
        table.add_column(name, justify="right")
    for tokens in _LENGTHS:
        swap, recompute = recovery.swap_seconds(tokens), recovery.recompute_seconds(tokens)
        above = recovery.crossover_link(tokens)
        table.add_row(
            f"{tokens:,}",
            format_time(swap),
            format_time(recompute),
            "swap" if swap < recompute else "recompute",
            "never" if above == math.inf else f"{format_size(above)}/s",
        )
    return table


def _finite(value: float) -> float | None:
    """As JSON has it: it knows no infinity."""
    return None if value == math.inf else value
