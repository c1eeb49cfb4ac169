"""`pagedkv bench throughput` and `pagedkv bench latency`: an engine in this process."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedkv.bench.prompts import Workload
from pagedkv.cli import engine_options as options
from pagedkv.cli.bench_show import calibration_facts, limit_facts, print_facts
from pagedkv.cli.units import format_size, format_time, read_count
from pagedkv.engine.sizes import parse_bytes
from pagedkv.errors import ConfigError

if TYPE_CHECKING:  # torch takes seconds to import: not for `--help` or a wrong option
    from pagedkv.engine.llm import LLM

_COUNT = "INTEGER"


def throughput(
    model: options.Model = options.EMBEDDED,
    num_prompts: Annotated[
        int,
        typer.Option(help="Requests, all submitted at once.", parser=read_count, metavar=_COUNT),
    ] = 32,
    input_len: Annotated[
        int, typer.Option(help="Tokens of a prompt.", parser=read_count, metavar=_COUNT)
    ] = 256,
    output_len: Annotated[
        int, typer.Option(help="Tokens of an answer.", parser=read_count, metavar=_COUNT)
    ] = 64,
    random_range_ratio: Annotated[
        float, typer.Option(help="Lengths are within len * (1 - R) to (1 + R).", metavar="R")
    ] = 0.0,
    random_prefix_len: Annotated[
        int,
        typer.Option(
            help="Further tokens before each prompt, the same for all.",
            parser=read_count,
            metavar=_COUNT,
        ),
    ] = 0,
    text: Annotated[
        Path | None,
        typer.Option(help="Prompts are pieces of this text, not random tokens.", metavar="FILE"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and lengths.", metavar=_COUNT)] = 0,
    dtype: options.DType = "auto",
    block_size: options.BlockSize = 16,
    num_blocks: options.NumBlocks = None,
    kv_memory: options.KVMemory = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = 256,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 512,
    no_prefix_caching: options.NoPrefixCaching = False,
    backend: options.Backend = "auto",
    kernels: options.Kernels = "auto",
    deterministic: options.Deterministic = False,
    as_json: options.Json = False,
) -> None:
    """Requests and tokens a second of a model in this process.

    Greedy, every answer in its full length. Options are named as those of `vllm bench throughput`.
    """
    _check_seed(seed)
    workload = Workload(num_prompts, input_len, output_len, random_range_ratio, random_prefix_len)
    words = None if text is None else _read_text(text)
    llm = _make(
        model,
        dtype=dtype,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_memory=None if kv_memory is None else parse_bytes(kv_memory, "--kv-memory"),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=not no_prefix_caching,
        attention_backend=backend,
        kernels=kernels,
        deterministic=deterministic,
    )
    import numpy as np

    from pagedkv.bench.generation import measure_throughput, plain_tokens, spread

    with closing(llm):
        jobs = workload.jobs(
            plain_tokens(llm),
            np.random.default_rng(seed),
            None if words is None else _tokens(llm, words, text),
        )
        taken = measure_throughput(llm, jobs)
    run = taken.run
    total = run.prompt_tokens + run.output_tokens
    facts = {
        "elapsed_time": run.seconds,
        "num_requests": len(jobs),
        "requests_per_second": len(jobs) / run.seconds,
        "output_tokens_per_second": run.output_tokens / run.seconds,
        "tokens_per_second": total / run.seconds,
        "prompt_tokens": run.prompt_tokens,
        "cached_tokens": run.cached_tokens,
        "output_tokens": run.output_tokens,
        "total_num_tokens": total,
        "ttft": spread(run.ttfts),
        "itl": spread(run.gaps),
        "steps": run.steps,
        "preemptions": run.preemptions,
        "peak_rss_bytes": taken.peak_rss_bytes,
        "cores_used": taken.cores_used,
    }
    cached = f" ({run.cached_tokens:,} from the prefix cache)" if run.cached_tokens else ""
    rows = [
        ("requests", f"{len(jobs):,} in {format_time(run.seconds)}, {run.steps:,} steps"),
        ("prompt tokens", f"{run.prompt_tokens:,}{cached}"),
        ("output tokens", f"{run.output_tokens:,}"),
        ("requests/s", f"{facts['requests_per_second']:.2f}"),
        ("output tokens/s", f"{facts['output_tokens_per_second']:.1f}"),
        ("total tokens/s", f"{facts['tokens_per_second']:.1f}"),
        *_latency_rows(facts),
        ("peak RSS", format_size(taken.peak_rss_bytes)),
        ("cores used", f"{taken.cores_used:.2f}"),
    ]
    if run.preemptions:
        rows.append(("preemptions", f"{run.preemptions:,}"))
    _print(llm, facts, rows, as_json)


def latency(
    model: options.Model = options.EMBEDDED,
    batch_size: Annotated[
        int, typer.Option(help="Requests, submitted together.", parser=read_count, metavar=_COUNT)
    ] = 8,
    input_len: Annotated[
        int, typer.Option(help="Tokens of a prompt.", parser=read_count, metavar=_COUNT)
    ] = 32,
    output_len: Annotated[
        int, typer.Option(help="Tokens of an answer.", parser=read_count, metavar=_COUNT)
    ] = 128,
    num_iters_warmup: Annotated[
        int, typer.Option(help="Batches that do not count.", metavar=_COUNT)
    ] = 1,
    num_iters: Annotated[int, typer.Option(help="Batches that count.", metavar=_COUNT)] = 5,
    seed: Annotated[int, typer.Option(help="Of prompts.", metavar=_COUNT)] = 0,
    dtype: options.DType = "auto",
    block_size: options.BlockSize = 16,
    num_blocks: options.NumBlocks = None,
    kv_memory: options.KVMemory = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = 256,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 512,
    backend: options.Backend = "auto",
    kernels: options.Kernels = "auto",
    deterministic: options.Deterministic = False,
    as_json: options.Json = False,
) -> None:
    """Times to the first and between further tokens of one batch, in this process.

    Greedy, new random prompts in every batch. Options are named as those of `vllm bench latency`.
    Prefill is counted until every request has its first token, decode from then on.
    """
    _check_seed(seed)
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("num_iters", num_iters, 1),
        ("num_iters_warmup", num_iters_warmup, 0),
    ):
        if value < least:
            raise ConfigError(f"{name}={value}: give at least {least}")
    workload = Workload(batch_size, input_len, output_len)
    llm = _make(
        model,
        dtype=dtype,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_memory=None if kv_memory is None else parse_bytes(kv_memory, "--kv-memory"),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        attention_backend=backend,
        kernels=kernels,
        deterministic=deterministic,
    )
    from pagedkv.bench.generation import measure_latency, spread

    with closing(llm):
        runs = measure_latency(
            llm,
            workload,
            warmup=num_iters_warmup,
            iterations=num_iters,
            seed=seed,
        )
    seconds = sorted(run.seconds for run in runs)
    rates = [run.decode_tokens_per_second for run in runs]
    decode = (
        statistics.median(rate for rate in rates if rate is not None) if output_len > 1 else None
    )
    facts = {
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "num_iters": num_iters,
        "avg_latency": sum(seconds) / len(seconds),
        "latencies": [run.seconds for run in runs],
        "ttft": spread([ttft for run in runs for ttft in run.ttfts]),
        "itl": spread([gap for run in runs for gap in run.gaps]),
        "prefill_tokens_per_second": statistics.median(
            run.prefill_tokens_per_second for run in runs
        ),
        "decode_tokens_per_second": decode,
    }
    rows = [
        ("batch", f"{batch_size:,} x ({input_len:,} in, {output_len:,} out), {num_iters} times"),
        (
            "whole batch",
            f"{format_time(statistics.median(seconds))} median, {format_time(seconds[-1])} max",
        ),
        *_latency_rows(facts),
        ("prefill tokens/s", f"{facts['prefill_tokens_per_second']:.1f}"),
        ("decode tokens/s", "none" if decode is None else f"{decode:.1f}"),
    ]
    _print(llm, facts, rows, as_json)


def _latency_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, title in (("ttft", "TTFT"), ("itl", "inter-token time")):
        times = facts[name]
        if times is not None:
            values = (format_time(times[f"p{percent}_ms"] / 1e3) for percent in (50, 90, 99))
            rows.append((title, "{} median, {} P90, {} P99".format(*values)))
    return rows


def _print(llm: LLM, facts: dict[str, Any], rows: Sequence[tuple[str, str]], as_json: bool) -> None:
    """With what ran, and the machine as it is now that it has."""
    import torch

    from pagedkv.bench.calibration import calibrate
    from pagedkv.bench.limits import measure_limits

    report = llm.report
    calibration = calibrate()
    limits = measure_limits(getattr(torch, report.dtype))
    ran = {
        "model": report.model,
        "dtype": report.dtype,
        "attention_backend": report.backend,
        "linear_kernels": report.linear_kernels,
        "num_threads": report.num_threads,
        "block_size": report.block_size,
        "num_blocks": report.num_blocks,
    }
    machine = {"calibration": calibration_facts(calibration), "limits": limit_facts(limits)}
    what = (
        f"{report.model}, {report.dtype}, attention {report.backend}, linear layers "
        f"{report.linear_kernels}, {report.num_threads} threads"
    )
    print_facts(ran | facts | machine, rows, (what, calibration, limits), as_json)


def _make(model: str, **settings: Any) -> LLM:
    from pagedkv.engine.llm import LLM

    # What the log says is printed here, or part of the JSON.
    logging.getLogger("pagedkv").addHandler(logging.NullHandler())
    llm = LLM(model, **settings)
    llm.get_tokenizer()  # which ids may be drawn: said before anything runs
    return llm


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise ConfigError(f"--seed={seed}: give at least 0")


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text={str(path)!r} cannot be read: {error}") from None


def _tokens(llm: LLM, words: str, path: Path | None) -> list[int]:
    ids: list[int] = llm.get_tokenizer()(words, add_special_tokens=False, verbose=False)[
        "input_ids"
    ]
    if not ids:
        raise ConfigError(f"--text={str(path)!r} holds no token")
    return ids
