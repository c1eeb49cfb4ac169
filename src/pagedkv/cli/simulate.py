"""`pagedkv simulate serve`: what users would have seen of a server."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pagedkv.cli.costs import Line, step_cost
from pagedkv.cli.html_file import check_report, write_report
from pagedkv.cli.workload import Invented, tenant_weights, workload
from pagedkv.scheduling.config import RECOVERIES
from pagedkv.scheduling.policies import POLICIES
from pagedkv.simulation.link import Link
from pagedkv.simulation.perf_tables import SplitwiseCost
from pagedkv.simulation.report import serve_report
from pagedkv.simulation.serve import Server, SimulatedRun
from pagedkv.simulation.serve import serve as simulate


def serve(
    trace: Annotated[
        Path | None,
        typer.Option(help="As of the other commands. Default: invented requests.", metavar="FILE"),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="Only so many. Default: the whole trace, or 500.", metavar="INTEGER"),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Invented requests: arrivals a second. Default: 2.", metavar="NUMBER"),
    ] = None,
    tenants: Annotated[
        str | None,
        typer.Option(
            help="Invented requests: instead of --rate, that of each tenant.",
            metavar="NAME=RATE,...",
        ),
    ] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(
            help="Invented requests: poisson, gamma:CV (coefficient of variation of the gaps) or "
            "bursts:ON,OFF (mean seconds). Default: poisson.",
            metavar="TEXT",
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Invented requests: mean. Default: 256.", metavar="INTEGER")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(help="Invented requests: mean. Default: 128.", metavar="INTEGER")
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            help="Invented requests: draw lengths from a table with the columns prompt_tokens and "
            "output_tokens.",
            metavar="FILE",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of invented requests. Default: 0.", metavar="INTEGER")
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(help="Let requests arrive so many times as fast.", metavar="NUMBER"),
    ] = None,
    blocks: Annotated[int, typer.Option(help="Blocks of the pool.", metavar="INTEGER")] = 2048,
    block_size: Annotated[int, typer.Option(help="Tokens a block.", metavar="INTEGER")] = 16,
    max_num_seqs: Annotated[
        int, typer.Option(help="Most sequences that run at once.", metavar="INTEGER")
    ] = 256,
    token_budget: Annotated[int, typer.Option(help="Tokens of a step.", metavar="INTEGER")] = 512,
    max_model_len: Annotated[
        int, typer.Option(help="Most tokens of a request.", metavar="INTEGER")
    ] = 16_384,
    admission: Annotated[
        str,
        typer.Option(
            help="What has to fit before a request starts: first_chunk, prompt, max_tokens or "
            "expected_peak.",
            metavar="TEXT",
        ),
    ] = "prompt",
    admission_quantile: Annotated[
        float,
        typer.Option(
            help="expected_peak: of its tenant's recent outputs, how long one is taken to be.",
            metavar="NUMBER",
        ),
    ] = 0.9,
    watermark: Annotated[
        float,
        typer.Option(
            help="Share of the pool that a start leaves free beside those who run.",
            metavar="NUMBER",
        ),
    ] = 0.0,
    step_ms: Annotated[
        float | None,
        typer.Option(help="Milliseconds of any step. Default: 19.9.", metavar="NUMBER"),
    ] = None,
    token_us: Annotated[
        float | None,
        typer.Option(help="Microseconds more for each token. Default: 101.9.", metavar="NUMBER"),
    ] = None,
    context_us: Annotated[
        float | None,
        typer.Option(
            help="Microseconds more for each token of context read. Default: 0.63.",
            metavar="NUMBER",
        ),
    ] = None,
    perf_table: Annotated[
        Path | None,
        typer.Option(
            help="Instead: costs of --model from a table, DistServe's fits or Splitwise's points.",
            metavar="FILE",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="As the table calls it.", metavar="TEXT")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="As the table calls it.", metavar="TEXT")
    ] = None,
    tp: Annotated[
        int | None, typer.Option(help="Tensor parallelism, of the table.", metavar="INTEGER")
    ] = None,
    recording: Annotated[
        Path | None,
        typer.Option(
            help="Instead: costs of the machine that made this recording.", metavar="FILE"
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(help=f"One of {', '.join(POLICIES)}.", metavar="TEXT")
    ] = "fcfs",
    weights: Annotated[
        str | None,
        typer.Option(
            "--tenant-weights",
            help="For policies that are fair; 1 for tenants that are not named.",
            metavar="NAME=WEIGHT,...",
        ),
    ] = None,
    host_blocks: Annotated[
        int,
        typer.Option(help="Blocks in host memory below the pool; 0 is none.", metavar="INTEGER"),
    ] = 0,
    link_gb: Annotated[
        float, typer.Option(help="GB/s between the two, either way.", metavar="NUMBER")
    ] = 25.0,
    token_bytes: Annotated[
        int, typer.Option(help="Bytes of K/V a token: what the link moves.", metavar="INTEGER")
    ] = 131_072,
    recovery: Annotated[
        str,
        typer.Option(help=f"Of victims: one of {', '.join(RECOVERIES)}.", metavar="TEXT"),
    ] = "auto",
    report: Annotated[
        Path | None,
        typer.Option(help="Write one HTML page with plots here, too.", metavar="FILE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Requests through the real scheduler and block manager, under a virtual clock.

    The default costs are those of OPT-13B on one A100 as DistServe fitted them (decode step and
    context; prefill tokens).
    """
    if report is not None:
        check_report(report)
    cost = step_cost(
        Line(step_ms, token_us, context_us), perf_table, model, hardware, tp, recording
    )
    invented = Invented(rate, tenants, arrivals, prompt_tokens, output_tokens, lengths, seed)
    wanted = workload(trace, requests, speed, invented)
    server = Server(
        blocks,
        block_size,
        max_num_seqs,
        token_budget,
        max_model_len,
        admission=admission,
        admission_quantile=admission_quantile,
        watermark=watermark,
        policy=policy,
        tenants=tenant_weights(weights),
        link=Link(host_blocks, block_size * token_bytes, link_gb * 1e9) if host_blocks else None,
        recovery=recovery,
    )
    run = simulate(wanted, server, cost)
    if isinstance(cost, SplitwiseCost) and cost.steps_outside:
        Console(stderr=True, highlight=False).print(
            f"{cost.steps_outside:,} steps were outside of what {perf_table} measured: smaller "
            "ones take as long as its smallest, larger ones go at the rate of its largest",
            style="yellow",
        )
    rows = _serve_rows(run)
    if report is not None:
        write_report(report, serve_report(run, rows))
    if as_json:
        print(json.dumps(_serve_facts(run)))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(name, value)
    Console(highlight=False).print(table)


def _failed(run: SimulatedRun) -> int:
    return sum(request.reason == "error" for request in run.requests)


def _serve_facts(run: SimulatedRun) -> dict[str, Any]:
    return {
        "requests": len(run.requests),
        "failed": _failed(run),
        "seconds": run.seconds,
        "steps": len(run.steps),
        "tokens_per_second": run.throughput,
        "ttft": run.percentiles("ttft"),
        "tpot": run.percentiles("tpot"),
        "preemptions": run.preemptions,
        "mean_waste": run.mean_waste,
        "cached_tokens": run.cached_tokens,
        "prompt_tokens": run.prompt_tokens,
        "tiers": None if run.moved is None else asdict(run.moved),
    }


def _serve_rows(run: SimulatedRun) -> dict[str, str]:
    """The same in words."""
    moved = {}
    if run.moved is not None:
        moved["blocks below"] = f"{run.moved.stored:,} stored, {run.moved.loaded:,} loaded"
    return {
        "requests": f"{len(run.requests):,}, {_failed(run):,} of them can never run",
        "virtual time": f"{run.seconds:,.1f} s, {len(run.steps):,} steps",
        "generated tokens/s": f"{run.throughput:,.1f}",
        "TTFT": _marks(run.percentiles("ttft"), 1.0, "s"),
        "TPOT": _marks(run.percentiles("tpot"), 1e3, "ms"),
        "preemptions": f"{run.preemptions:,}",
        "empty slots of held blocks": f"{run.mean_waste:.2%}",
        "prompt tokens": f"{run.prompt_tokens:,}, {run.cached_tokens:,} from the prefix cache",
        **moved,
    }


def _marks(percentiles: dict[str, float], scale: float, unit: str) -> str:
    """Percentiles in words."""
    if not percentiles:
        return "no request has one"
    marks = (f"{name.upper()} {value * scale:.3g} {unit}" for name, value in percentiles.items())
    return ", ".join(marks)
