"""`pagedkv simulate`: what a trace would have made of memory and prefix cache, no scheduler."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pagedkv.cli.html_file import check_report, write_report
from pagedkv.cli.units import format_size
from pagedkv.cli.workload import TRACES_VARIABLE, find_trace
from pagedkv.errors import ConfigError
from pagedkv.simulation.allocators import run_allocators
from pagedkv.simulation.prefix_cache import hit_rate
from pagedkv.simulation.report import allocators_report
from pagedkv.simulation.trace import read_trace
from pagedkv.simulation.utilisation import utilisation

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
    result = hit_rate(read_trace(find_trace(trace)), blocks, block_size, eviction)
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
    result = utilisation(read_trace(find_trace(trace)), sizes, max_length)
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


def allocators(
    trace: Annotated[Path, _TRACE],
    requests: Annotated[
        int | None, typer.Option(help="Only the first so many.", metavar="INTEGER")
    ] = None,
    slots: Annotated[
        int, typer.Option(help="Token slots of the pool.", metavar="INTEGER")
    ] = 80_000,
    block_size: Annotated[int, typer.Option(help="Tokens a block.", metavar="INTEGER")] = 16,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="What reserving the maximum sets aside. Default: the trace's longest request.",
            metavar="INTEGER",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(help="Most sequences that are resident at once.", metavar="INTEGER")
    ] = 256,
    step_ms: Annotated[
        float, typer.Option(help="Milliseconds in which everybody gains a token.", metavar="NUMBER")
    ] = 50.0,
    token_bytes: Annotated[
        int | None,
        typer.Option(
            help="Bytes of K and V of a token, as `pagedkv plan` prints them: show what is copied "
            "in bytes.",
            metavar="INTEGER",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write one HTML page with plots here, too.", metavar="FILE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Paging beside contiguous reservations: who fits, what is wasted, what holes cost."""
    if token_bytes is not None and token_bytes < 1:
        raise ConfigError(f"--token-bytes={token_bytes}: give at least 1")
    if report is not None:
        check_report(report)
    wanted = read_trace(find_trace(trace))
    wanted = wanted if requests is None else wanted.first(requests)
    seconds = step_ms / 1e3
    accounts = run_allocators(wanted, slots, block_size, max_length, max_num_seqs, seconds)
    if report is not None:
        write_report(report, allocators_report(accounts, seconds))
    reports = {name: account.report() for name, account in accounts.items()}
    if as_json:
        print(json.dumps(reports))
        return

    def copied(tokens: float) -> str:
        return f"{tokens:,.0f}" if token_bytes is None else format_size(tokens * token_bytes)

    # Without a frame nine columns fit into 80 characters.
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, caption_justify="left")
    for name in ("", "seqs", "live", "vain", "refused", "short", "copied", "each", "steps"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name, facts in reports.items():
        tokens = facts["tokens_moved"] + facts["tokens_restored"]
        table.add_row(
            name,
            f"{facts['mean_resident']:.1f}",
            f"{facts['utilisation']:.1%}",
            f"{facts['internal_waste']:.1%}",
            f"{facts['refused_while_free_sufficed']:,.0f}",
            f"{facts['shortages']:,.0f}",
            copied(tokens),
            copied(tokens / max(facts["shortages"], 1)),
            f"{facts['steps']:,.0f}",
        )
    table.caption = (
        "Means per step: sequences resident, share of the pool that is live and that is reserved "
        "in vain. Steps in which the first of the queue was refused although the free slots would "
        "have sufficed. Shortages, and the tokens that compaction moved or that were restored "
        "after preemption: in all, and for each shortage. Steps until all was done."
    )
    Console(highlight=False).print(table)
