"""`pagedkv simulate`: what a trace of requests would have made of memory and prefix cache."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pagedkv.errors import ConfigError
from pagedkv.simulation.prefix_cache import hit_rate
from pagedkv.simulation.trace import Trace, read_trace
from pagedkv.simulation.utilisation import utilisation

TRACES_VARIABLE = "PAGEDKV_TRACES"

_TRACE = typer.Option(
    help=f"CSV or .jsonl file; a bare name is looked for in {TRACES_VARIABLE} too.", metavar="FILE"
)


def cache(
    trace: Annotated[Path, _TRACE],
    blocks: Annotated[
        int, typer.Option(help="Blocks of the pool; 0 is without a limit.", metavar="INTEGER")
    ] = 0,
    block_size: Annotated[
        int | None,
        typer.Option(help="Tokens a block: that of the trace's block ids.", metavar="INTEGER"),
    ] = None,
    eviction: Annotated[str, typer.Option(help="slru or lru.", metavar="TEXT")] = "slru",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Prefix hit rate of a trace's prompts, in order of arrival, through the real block manager."""
    result = hit_rate(_read(trace), blocks, block_size, eviction)
    if as_json:
        print(json.dumps({"token_hit_rate": result.token_hit_rate} | asdict(result)))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in (
        ("requests", f"{result.requests:,}"),
        ("prompt tokens", f"{result.prompt_tokens:,}"),
        ("found in the cache", f"{result.found_tokens:,} ({result.token_hit_rate:.1%})"),
        ("prompts larger than the pool", f"{result.too_large:,}"),
    ):
        table.add_row(name, value)
    Console(highlight=False).print(table)


def memory(
    trace: Annotated[Path, _TRACE],
    block_sizes: Annotated[
        str, typer.Option(help="Tokens a block, to be compared.", metavar="B,B,...")
    ] = "1,8,16,32,64,128",
    max_length: Annotated[
        int | None,
        typer.Option(
            help="What reserving the maximum sets aside. Default: the trace's longest request.",
            metavar="INTEGER",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Time-averaged utilisation of reserved slots: paging against contiguous reservations."""
    try:
        sizes = [int(item) for item in block_sizes.split(",")]
    except ValueError:
        raise ConfigError(f"--block-sizes={block_sizes!r} must be numbers, such as 8,16") from None
    result = utilisation(_read(trace), sizes, max_length)
    if as_json:
        facts = asdict(result)
        limits = {name: facts.pop(name) for name in ("max_length", "longer")}
        print(json.dumps({"utilisation": facts} | limits))
        return
    table = Table("reservation", "utilisation")
    for size, value in result.paged.items():
        table.add_row(f"paged, blocks of {size}", f"{value:.2%}")
    table.add_row(f"maximum, {result.max_length:,} slots", f"{result.max:.2%}")
    table.add_row("prompt + power of two", f"{result.pow2:.2%}")
    table.add_row("prompt + output, known before", f"{result.oracle:.2%}")
    Console(highlight=False).print(table)
    if result.longer:
        Console(stderr=True, highlight=False).print(
            f"{result.longer:,} requests have more tokens than the {result.max_length:,} slots "
            "of the maximum: it could not serve them",
            style="yellow",
        )


def _read(path: Path) -> Trace:
    elsewhere = Path(os.environ.get(TRACES_VARIABLE, "")) / path
    if len(path.parts) == 1 and not path.exists() and elsewhere.exists():
        path = elsewhere
    return read_trace(path)
