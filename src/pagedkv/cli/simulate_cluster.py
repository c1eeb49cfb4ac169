"""`pagedkv simulate cluster`: requests on many workers, with prefill and decode apart or not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pagedkv.cli.costs import Line, step_cost
from pagedkv.cli.units import format_size
from pagedkv.cli.workload import Invented, workload
from pagedkv.errors import ConfigError
from pagedkv.simulation.cluster import ClusterRun, ClusterShape, serve_cluster
from pagedkv.simulation.incidents import Incidents
from pagedkv.simulation.network import LinkModel
from pagedkv.simulation.objective import Objective
from pagedkv.simulation.serve import Server, percentiles
from pagedkv.transfer.roles import flip_config


def cluster(
    workers: Annotated[
        int, typer.Option(help="Workers that prefill and decode.", metavar="INTEGER")
    ] = 0,
    prefill_workers: Annotated[
        int, typer.Option(help="Instead: workers that prefill ...", metavar="INTEGER")
    ] = 0,
    decode_workers: Annotated[
        int, typer.Option(help="... and workers that decode.", metavar="INTEGER")
    ] = 0,
    ttft: Annotated[
        float, typer.Option(help="Seconds to the first token that users want.", metavar="NUMBER")
    ] = 1.0,
    tpot: Annotated[
        float,
        typer.Option(help="Seconds between tokens, mean of a request.", metavar="NUMBER"),
    ] = 0.1,
    share: Annotated[
        float, typer.Option(help="Of the requests that both are for.", metavar="NUMBER")
    ] = 0.9,
    shed: Annotated[
        bool,
        typer.Option("--shed", help="Refuse requests whose first token cannot come in time."),
    ] = False,
    drain: Annotated[
        list[str] | None,
        typer.Option(
            help="Take a worker out of service: what it has moves away. Repeatable.",
            metavar="WORKER@SECONDS",
        ),
    ] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(
            help="Let a worker die with all that it has, for good. Repeatable.",
            metavar="WORKER@SECONDS",
        ),
    ] = None,
    flip_after: Annotated[
        float | None,
        typer.Option(
            help="Seconds that one role is short of workers before one of the other changes to it. "
            "Default: roles stay.",
            metavar="NUMBER",
        ),
    ] = None,
    network_gb: Annotated[
        float, typer.Option(help="GB/s of a worker's link, each way.", metavar="NUMBER")
    ] = 25.0,
    network_us: Annotated[
        float, typer.Option(help="Microseconds of a message's way.", metavar="NUMBER")
    ] = 20.0,
    piece_us: Annotated[
        float,
        typer.Option(help="Microseconds more for each block that is sent.", metavar="NUMBER"),
    ] = 0.0,
    token_bytes: Annotated[
        int, typer.Option(help="Bytes of K/V a token: what the links move.", metavar="INTEGER")
    ] = 131_072,
    trace: Annotated[
        Path | None,
        typer.Option(help="As of the other commands. Default: invented requests.", metavar="FILE"),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="Only so many. Default: the whole trace, or 500.", metavar="INTEGER"),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(help="Let requests arrive so many times as fast.", metavar="NUMBER"),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Invented requests: arrivals a second. Default: 2.", metavar="NUMBER"),
    ] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(
            help="Invented requests: poisson, gamma:CV or bursts:ON,OFF. Default: poisson.",
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
        typer.Option(help="Invented requests: draw lengths from a table.", metavar="FILE"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of invented requests. Default: 0.", metavar="INTEGER")
    ] = None,
    blocks: Annotated[
        int, typer.Option(help="Blocks of each worker's pool.", metavar="INTEGER")
    ] = 2048,
    block_size: Annotated[int, typer.Option(help="Tokens a block.", metavar="INTEGER")] = 16,
    max_num_seqs: Annotated[
        int, typer.Option(help="Most sequences that run at once on a worker.", metavar="INTEGER")
    ] = 256,
    token_budget: Annotated[int, typer.Option(help="Tokens of a step.", metavar="INTEGER")] = 512,
    max_model_len: Annotated[
        int, typer.Option(help="Most tokens of a request.", metavar="INTEGER")
    ] = 16_384,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Requests on workers with the real scheduler, router and transfer, under a virtual clock.

    Costs of steps are those of `simulate serve`. Every worker has a link of its own; what it sends
    waits for what was sent before, and takes none of its steps' time. Workers are called worker-0,
    prefill-0, decode-0 and so on.
    """
    if workers and (prefill_workers or decode_workers):
        raise ConfigError(
            f"--workers={workers} does both, beside --prefill-workers={prefill_workers} and "
            f"--decode-workers={decode_workers}: give --workers, or the other two"
        )
    if not workers and not (prefill_workers and decode_workers):
        raise ConfigError(
            f"--prefill-workers={prefill_workers} and --decode-workers={decode_workers} need each "
            "other: give at least 1 of both, or --workers"
        )
    if not network_gb > 0:
        raise ConfigError(f"--network-gb={network_gb}: give more than 0")
    objective = Objective(ttft, tpot, share)
    cost = step_cost(
        Line(step_ms, token_us, context_us), perf_table, model, hardware, tp, recording
    )
    invented = Invented(rate, None, arrivals, prompt_tokens, output_tokens, lengths, seed)
    wanted = workload(trace, requests, speed, invented)
    shape = ClusterShape(
        Server(blocks, block_size, max_num_seqs, token_budget, max_model_len),
        workers,
        prefill_workers,
        decode_workers,
        token_bytes,
        LinkModel(network_gb * 1e9, network_us / 1e6, piece_us / 1e6),
    )
    incidents = Incidents(
        _moments("drain", drain),
        _moments("kill", kill),
        None if flip_after is None else flip_config(flip_after),
    )
    if workers and flip_after is not None:
        raise ConfigError(
            f"--flip-after={flip_after}: --workers have one role: leave it out, or give "
            "--prefill-workers and --decode-workers"
        )
    run = serve_cluster(wanted, shape, cost, shed=objective if shed else None, incidents=incidents)
    if as_json:
        print(json.dumps(_facts(run, objective)))
        return
    console = Console(highlight=False)
    console.print(_summary(run, objective))
    for name, seconds in (*incidents.drains, *incidents.deaths):
        if seconds > run.seconds:
            console.print(f"nothing happened to {name} at {seconds:g} s: all was over before")
    console.print(_workers(run))


def _moments(option: str, values: list[str] | None) -> tuple[tuple[str, float], ...]:
    """Workers and seconds. ConfigError for a value that says no such thing."""
    moments = []
    for value in values or ():
        worker, _, seconds = value.rpartition("@")
        try:
            moments.append((worker, float(seconds)))
        except ValueError:
            raise ConfigError(
                f"--{option} {value!r:.100}: give a worker and seconds, as in decode-1@30"
            ) from None
    return tuple(moments)


def _facts(run: ClusterRun, objective: Objective) -> dict[str, Any]:
    return {
        "requests": len(run.requests),
        "failed": run.ended("error"),
        "shed": run.ended("shed"),
        "seconds": run.seconds,
        "attainment": run.attainment(objective),
        "ttft_attainment": run.ttft_attainment(objective),
        "tpot_attainment": run.tpot_attainment(objective),
        "goodput": run.goodput(objective),
        "borne": run.attainment(objective) >= objective.share,
        "ttft": percentiles(run.requests, "ttft"),
        "tpot": percentiles(run.requests, "tpot"),
        "prompt_tokens": run.prompt_tokens,
        "cached_tokens": run.cached_tokens,
        "moves": asdict(run.moves),
        "resumed": run.resumed,
        "flips": run.flips,
        "network": asdict(run.network),
        "decisions": run.decisions,
        "events": run.num_events,
        "workers": [asdict(worker) for worker in run.workers],
    }


def _summary(run: ClusterRun, objective: Objective) -> Table:
    """The same in words."""
    borne = "borne" if run.attainment(objective) >= objective.share else "not borne"
    moves, network = run.moves, run.network
    resumed = f", {run.resumed:,} resumed where their worker died" if run.resumed else ""
    incidents = resumed + (f"; roles changed {run.flips:,} times" if run.flips else "")
    refused = f", {run.ended('shed'):,} refused" if run.ended("shed") else ""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in {
        "requests": f"{len(run.requests):,}, {run.ended('error'):,} can never run{refused}",
        "virtual time": f"{run.seconds:,.1f} s",
        "served well": f"{run.attainment(objective):.1%}: a load that is {borne}",
        "goodput": f"{run.goodput(objective):.3f} requests/s a worker",
        f"TTFT within {objective.ttft:g} s": f"{run.ttft_attainment(objective):.1%}; "
        + _marks(percentiles(run.requests, "ttft"), 1.0, "s"),
        f"TPOT within {objective.tpot * 1e3:g} ms": f"{run.tpot_attainment(objective):.1%}; "
        + _marks(percentiles(run.requests, "tpot"), 1e3, "ms"),
        "prompt tokens": f"{run.prompt_tokens:,}, {run.cached_tokens:,} from the prefix cache",
        "moved": f"{moves.received:,} requests, {moves.blocks_sent:,} blocks; "
        f"{moves.tokens_there:,} tokens were there, {moves.failed:,} moves failed{incidents}",
        "links": f"{format_size(network.bytes)}, busy {network.busy_seconds:,.1f} s, "
        f"waited for {network.waited_seconds:,.1f} s",
        "router": f"{run.decisions:,} decisions",
    }.items():
        table.add_row(name, value)
    return table


def _workers(run: ClusterRun) -> Table:
    """Workers by what they do; each on its own would be many."""
    table = Table(title="workers")
    for name in ("role", "workers", "busy", "least", "most", "steps", "requests"):
        table.add_column(name, justify="right")
    for role in ("both", "prefill", "decode"):
        of_role = [worker for worker in run.workers if worker.role == role]
        if not of_role:
            continue
        busy = [worker.busy_seconds / run.seconds if run.seconds else 0.0 for worker in of_role]
        table.add_row(
            role,
            f"{len(of_role):,}",
            f"{sum(busy) / len(busy):.0%}",
            f"{min(busy):.0%}",
            f"{max(busy):.0%}",
            f"{sum(worker.steps for worker in of_role):,}",
            f"{sum(worker.requests + worker.received for worker in of_role):,}",
        )
    return table


def _marks(values: dict[str, float], scale: float, unit: str) -> str:
    marks = (f"{name.upper()} {value * scale:.3g} {unit}" for name, value in values.items())
    return ", ".join(marks) or "no request has one"
