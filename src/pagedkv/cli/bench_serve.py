"""`pagedkv bench serve`: load on a server, and what its users saw."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from pagedkv.cli import load_options as options
from pagedkv.cli.html_file import check_report, write_report
from pagedkv.cli.load_show import print_result, write_result
from pagedkv.cli.main import FAILED
from pagedkv.cli.progress import request_bar
from pagedkv.cli.units import read_count
from pagedkv.errors import ConfigError
from pagedkv.loadtest.requests import LoadRequest

if TYPE_CHECKING:  # what they need is in the extra `server`
    from pagedkv.loadtest.client import Target
    from pagedkv.loadtest.run import LoadRun

_ENDPOINTS = MappingProxyType(
    {
        "openai": "/v1/completions",
        "vllm": "/v1/completions",
        "openai-chat": "/v1/chat/completions",
    }
)
_COUNT, _NUMBER, _TEXT = "INTEGER", "NUMBER", "TEXT"


def serve(
    more_goals: Annotated[
        list[str] | None,
        typer.Argument(help="Further goals, after --goodput.", metavar="[METRIC:MS]..."),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(help="Of the server. Default: http://HOST:PORT.", metavar="URL"),
    ] = None,
    host: Annotated[str, typer.Option(help="Of the server.", metavar=_TEXT)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Of the server.", metavar=_COUNT)] = 8000,
    backend: Annotated[
        str,
        typer.Option(help="openai (or vllm): completions; openai-chat: chats.", metavar=_TEXT),
    ] = "openai",
    endpoint: Annotated[
        str | None, typer.Option(help="Default: that of the backend.", metavar="PATH")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Default: the first that the server names.", metavar=_TEXT)
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Of requests without --tenant.", envvar="PAGEDKV_API_KEY", metavar=_TEXT),
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            help="Send requests with this key, in shares; may be repeated.",
            metavar="NAME=KEY[:SHARE]",
        ),
    ] = None,
    slo_class: Annotated[
        list[str] | None,
        typer.Option(
            help="Goals of some requests in ms, which they tell the server; may be repeated.",
            metavar="NAME=TTFT:TPOT[:SHARE]",
        ),
    ] = None,
    dataset_name: Annotated[
        str, typer.Option(help=f"One of {', '.join(options.DATASETS)}.", metavar=_TEXT)
    ] = "random",
    dataset_path: Annotated[
        Path | None,
        typer.Option(
            help="custom: a .jsonl or CSV file with prompts; timed_trace: a trace as of "
            "`pagedkv simulate`.",
            metavar="FILE",
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Default: 1000, or the whole file.", parser=read_count, metavar=_COUNT),
    ] = None,
    input_len: Annotated[
        int,
        typer.Option(
            "--input-len",
            "--random-input-len",
            help="random: tokens of a prompt.",
            parser=read_count,
            metavar=_COUNT,
        ),
    ] = 1024,
    output_len: Annotated[
        int,
        typer.Option(
            "--output-len",
            "--random-output-len",
            "--custom-output-len",
            "--prefix-repetition-output-len",
            help="Tokens of an answer.",
            parser=read_count,
            metavar=_COUNT,
        ),
    ] = 128,
    random_range_ratio: Annotated[
        float,
        typer.Option(help="random: lengths are within len * (1 - R) to (1 + R).", metavar="R"),
    ] = 0.0,
    prefix_repetition_prefix_len: Annotated[
        int, typer.Option(help="Tokens of a prefix.", parser=read_count, metavar=_COUNT)
    ] = 256,
    prefix_repetition_suffix_len: Annotated[
        int, typer.Option(help="Tokens after it.", parser=read_count, metavar=_COUNT)
    ] = 256,
    prefix_repetition_num_prefixes: Annotated[
        int, typer.Option(help="Different ones.", parser=read_count, metavar=_COUNT)
    ] = 10,
    request_rate: Annotated[
        str | None,
        typer.Option(
            help="Arrivals a second; inf: all at once. Default: inf, or the times of the trace.",
            metavar=_NUMBER,
        ),
    ] = None,
    burstiness: Annotated[
        float | None,
        typer.Option(
            help="Shape of the Gamma distribution of gaps: 1 is Poisson, below 1 clusters.",
            metavar=_NUMBER,
        ),
    ] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(
            help="Instead: poisson, gamma:CV or bursts:ON,OFF (mean seconds).", metavar=_TEXT
        ),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(help="timed_trace: let requests come so many times as fast.", metavar=_NUMBER),
    ] = None,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            help="Most requests under way; the loop is not open then.",
            parser=read_count,
            metavar=_COUNT,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.", metavar=_COUNT)] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers have all the tokens that are asked for.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", metavar=_NUMBER)] = 0.0,
    extra_body: Annotated[
        str | None, typer.Option(help="Further fields of every request.", metavar="JSON")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds until a request is given up.", metavar=_NUMBER)
    ] = 600.0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help="Goals that a good request reaches: ttft, tpot, e2el in ms, such as ttft:200 "
            "tpot:50.",
            metavar="METRIC:MS",
        ),
    ] = None,
    percentile_metrics: Annotated[
        str, typer.Option(help="Latencies to print: ttft, tpot, itl, e2el.", metavar=_TEXT)
    ] = "ttft,tpot,itl",
    metric_percentiles: Annotated[
        str, typer.Option(help="Percentiles of latencies.", metavar="P,P,...")
    ] = "99",
    label: Annotated[
        str | None, typer.Option(help="What the result is called.", metavar=_TEXT)
    ] = None,
    save_result: Annotated[
        bool, typer.Option("--save-result", help="Write the result as a JSON file.")
    ] = False,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="With times and texts of each request.")
    ] = False,
    result_dir: Annotated[
        Path | None, typer.Option(help="Where to. Default: here.", metavar="FOLDER")
    ] = None,
    result_filename: Annotated[
        str | None,
        typer.Option(help="Default: LABEL-RATEqps-MODEL-TIME.json.", metavar=_TEXT),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write an HTML page with plots here.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> int:
    """Put load on any server that speaks OpenAI's API, and measure what its users see.

    Requests come when they come, whatever becomes of those before them. Options and results have
    the names of `vllm bench serve`.
    """
    goals = options.read_goals([*(goodput or []), *(more_goals or [])])
    tenants, classes = options.read_tenants(tenant or []), options.read_slo_classes(slo_class or [])
    percentiles = options.read_percentiles(metric_percentiles)
    shown = options.read_metrics(percentile_metrics)
    body = {"temperature": temperature} | ({"ignore_eos": True} if ignore_eos else {})
    body |= options.read_body(extra_body)
    options.check_least("--max-concurrency", max_concurrency, 1)
    options.check_least("--timeout", timeout, 0.001)
    if backend not in _ENDPOINTS:
        raise ConfigError(f"--backend={backend!r}: use one of {', '.join(_ENDPOINTS)}")
    if plot is not None:
        check_report(plot, "--plot")
    folder = result_dir or Path()
    if save_result and not folder.is_dir():
        raise ConfigError(f"--result-dir={str(folder)!r} is no folder: make it first")
    requests = options.Workload(
        dataset_name,
        dataset_path,
        num_prompts,
        input_len,
        output_len,
        random_range_ratio,
        prefix_repetition_prefix_len,
        prefix_repetition_suffix_len,
        prefix_repetition_num_prefixes,
        request_rate,
        burstiness,
        arrivals,
        speed,
        seed,
    ).make(tenants, classes)
    from pagedkv.loadtest.client import Target, first_model

    url = (base_url or f"http://{host}:{port}").rstrip("/")
    key = tenants[0].key if api_key is None and tenants else api_key
    if model is None:
        model = asyncio.run(first_model(url, key))
    where = endpoint or _ENDPOINTS[backend]
    target = Target(url, where, model, backend == "openai-chat", key, timeout, body)
    console = Console(stderr=True, highlight=False)
    date = time.strftime("%Y%m%d-%H%M%S")
    run = _run(requests, target, max_concurrency, console)
    rate = request_rate or ("trace" if dataset_name == "timed_trace" else "inf")
    facts: dict[str, Any] = {
        "date": date,
        "backend": backend,
        "label": label,
        "model_id": model,
        "num_prompts": len(requests),
        "request_rate": rate if rate in ("inf", "trace") else float(rate),
        "burstiness": burstiness,
        "max_concurrency": max_concurrency,
    }
    result = facts | run.result(goals, percentiles)
    if as_json:
        print(json.dumps(result))
    else:
        print_result(result, shown, percentiles)
    if save_result:
        limit = "" if max_concurrency is None else f"-concurrency{max_concurrency}"
        name = f"{label or backend}-{rate}qps{limit}-{model.rpartition('/')[2]}-{date}.json"
        details = run.details() if save_detailed else {}
        write_result(folder / (result_filename or name), result | details)
    if plot is not None:
        from pagedkv.loadtest.page import load_page

        shown_facts = {name: str(value) for name, value in facts.items() if value is not None}
        write_report(plot, load_page(run, shown_facts), "--plot")
    return 0 if result["completed"] else FAILED


def _run(
    requests: Sequence[LoadRequest],
    target: Target,
    max_concurrency: int | None,
    console: Console,
) -> LoadRun:
    from pagedkv.loadtest.run import run_load

    bar, advance = request_bar(len(requests), console)
    with bar:
        load = run_load(
            requests, target, max_concurrency=max_concurrency, on_end=lambda outcome: advance()
        )
        return asyncio.run(load)
