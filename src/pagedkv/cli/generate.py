"""`pagedkv generate`: prompts in, text out, and what it cost."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pagedkv.cli import engine_options as options
from pagedkv.cli.main import FAILED
from pagedkv.cli.prompts import PromptText, read_prompts
from pagedkv.engine.sizes import parse_bytes
from pagedkv.errors import ConfigError, RequestError
from pagedkv.scheduling.config import ADMISSIONS
from pagedkv.scheduling.messages import StepStats
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.policies import POLICIES

if TYPE_CHECKING:  # torch takes seconds to import: not for `--help` or a wrong option
    from pagedkv.cli.usage import Usage
    from pagedkv.engine.llm import LLM
    from pagedkv.engine.output import RequestOutput
    from pagedkv.engine.requests import Prepared, Prompt
    from pagedkv.engine.tiers import TierConfig

_TEXT, _INTEGER, _NUMBER = "TEXT", "INTEGER", "NUMBER"


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Prompts; - is stdin. Without any: --file, else stdin.", metavar=_TEXT),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="File with one prompt a line; - is stdin.", metavar="FILE"),
    ] = None,
    model: options.Model = options.EMBEDDED,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Whether prompts go through the chat template. Default: if the model has one.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Most tokens of a sample.", metavar=_INTEGER)
    ] = 128,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text that ends a sample; may be repeated.", metavar=_TEXT),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", metavar=_NUMBER)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus; 1 is off.", metavar=_NUMBER)] = 1.0,
    top_k: Annotated[int, typer.Option(help="Best k tokens; 0 is off.", metavar=_INTEGER)] = 0,
    min_p: Annotated[
        float,
        typer.Option(help="Least share of the best token's probability.", metavar=_NUMBER),
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: less repetition.", metavar=_NUMBER)
    ] = 1.0,
    seed: Annotated[
        int,
        typer.Option(
            help="Each prompt gets a seed drawn from this one; its sample i adds i.",
            metavar=_INTEGER,
        ),
    ] = 0,
    n: Annotated[int, typer.Option("-n", help="Samples a prompt.", metavar=_INTEGER)] = 1,
    dtype: options.DType = "auto",
    block_size: options.BlockSize = 16,
    num_blocks: options.NumBlocks = None,
    kv_memory: options.KVMemory = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = 256,
    no_prefix_caching: options.NoPrefixCaching = False,
    backend: options.Backend = "auto",
    kernels: options.Kernels = "auto",
    deterministic: options.Deterministic = False,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="Check every use of a block. Slower.")
    ] = False,
    replay_log: Annotated[
        Path | None,
        typer.Option(help="With --sanitize: where the calls before an error go.", metavar="FILE"),
    ] = None,
    decision_log: Annotated[
        Path | None,
        typer.Option(help="Where the scheduler's decisions go, for explain.", metavar="FILE"),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Where the run goes, for simulate replay.", metavar="FILE"),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(help=f"Who is served first: {', '.join(POLICIES)}.", metavar=_TEXT),
    ] = "fcfs",
    admission: Annotated[
        str,
        typer.Option(help=f"What must fit first: {', '.join(ADMISSIONS)}.", metavar=_TEXT),
    ] = "prompt",
    host_tier: Annotated[
        str | None,
        typer.Option(help="Host memory for blocks that leave the pool.", metavar="SIZE"),
    ] = None,
    disk_tier: Annotated[
        Path | None,
        typer.Option(help="Folder for them that outlives the process.", metavar="FOLDER"),
    ] = None,
    disk_tier_size: Annotated[
        str | None, typer.Option(help="Most bytes in the folder. Default: 1GiB.", metavar="SIZE")
    ] = None,
    write_through: Annotated[
        bool, typer.Option("--write-through", help="Store blocks on the disk at once, with fsync.")
    ] = False,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Print text as it comes. Default: for one sample of one prompt, without --json.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> int:
    """Generate text from prompts."""
    texts = read_prompts(prompts or [], file, sys.stdin)
    can_stream = len(texts) == 1 and n == 1 and not as_json
    if stream and not can_stream:
        raise RequestError(
            f"--stream cannot show {len(texts)} prompts, {n} samples of each"
            f"{' and JSON' if as_json else ''}: it takes one prompt, one sample and no --json"
        )
    params = SamplingParams(
        n=n,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop or (),
        max_tokens=max_tokens,
    )
    if n > 1 and params.greedy:
        raise RequestError(
            f"the {n} samples of -n {n} are the same when greedy: give --temperature"
        )
    kv_cache_memory = None if kv_memory is None else parse_bytes(kv_memory, "--kv-memory")
    from pagedkv.cli import show
    from pagedkv.engine.llm import LLM

    # What the log says is printed here, or part of the JSON.
    logging.getLogger("pagedkv").addHandler(logging.NullHandler())

    llm = LLM(
        model,
        dtype=dtype,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_memory=kv_cache_memory,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=not no_prefix_caching,
        attention_backend=backend,
        kernels=kernels,
        deterministic=deterministic,
        seed=seed,
        sanitize=sanitize,
        scheduling={"policy": policy, "admission": admission},
        replay_log=replay_log,
        decision_log=decision_log,
        record=record,
        tiers=_tiers(host_tier, disk_tier, disk_tier_size, write_through),
    )
    llm.get_tokenizer()  # without one there is no text: said before the first prompt is read
    if chat and not llm.engine.has_chat_template:
        raise RequestError(f"{model} has no chat template: use --no-chat")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character
    through_template = llm.engine.has_chat_template if chat is None else chat
    requests = _prepare(llm, texts, params, through_template)
    console = Console(stderr=True, highlight=False)
    if as_json:
        outputs, usage = _run(llm, requests, nullcontext(), lambda output: None)
        off = None if llm.tier is None else llm.tier.off
        cost, moved = llm.engine.cost.describe(), llm.engine.tiering
        print(show.as_json(llm.report, outputs, texts, usage, cost, moved, off))
        return _status(outputs)
    for line in llm.report.lines():
        console.print(line, style="dim", markup=False, soft_wrap=True)
    if can_stream and stream is not False:
        outputs, usage = _run(llm, requests, nullcontext(), show.stream_text())
    else:
        outputs, usage = _run(llm, requests, *show.progress_bar(len(texts), console))
        show.print_texts(outputs, texts)
    show.print_problems(outputs, texts, console)
    console.print(usage.table(llm.report.max_model_len))
    if llm.engine.tiering is not None:
        moved = llm.engine.tiering
        console.print(
            f"tiers: {moved.stored:,} blocks stored, {moved.loaded:,} loaded, "
            f"{moved.failed_loads:,} not to be had, {moved.failed_stores:,} not stored",
            style="dim",
        )
        if llm.tier is not None and llm.tier.off is not None:
            console.print(llm.tier.off, style="yellow", markup=False, soft_wrap=True)
    console.print(f"time of a step: {llm.engine.cost}", style="dim", markup=False, soft_wrap=True)
    return _status(outputs)


def _tiers(
    host: str | None, folder: Path | None, size: str | None, write_through: bool
) -> TierConfig | None:
    from pagedkv.engine.tiers import TierConfig

    if size is not None and folder is None:
        raise ConfigError(f"--disk-tier-size={size} is that of a folder: give --disk-tier too")
    if host is None and folder is None and not write_through:
        return None
    return TierConfig(
        host_memory=0 if host is None else parse_bytes(host, "--host-tier"),
        disk_folder=folder,
        disk_memory=0 if folder is None else parse_bytes(size or "1GiB", "--disk-tier-size"),
        write_through=write_through,
    )


def _prepare(
    llm: LLM, texts: Sequence[PromptText], params: SamplingParams, through_template: bool
) -> list[Prepared]:
    """The requests, all of them checked. RequestError says where the prompt stands."""
    requests: list[Prepared] = []
    for given in texts:
        try:
            prompt: Prompt = given.text
            if through_template:
                prompt = llm.engine.chat_prompt([{"role": "user", "content": given.text}])
            requests += llm.prepare(prompt, params)
        except RequestError as error:
            raise RequestError(f"{given.place}: {error}") from error
    return requests


def _run(
    llm: LLM,
    requests: Sequence[Prepared],
    display: AbstractContextManager[object],
    watch: Callable[[RequestOutput], None],
) -> tuple[list[RequestOutput], Usage]:
    """Runs all requests to their end and measures them; `watch` sees every output."""
    from pagedkv.cli.usage import Meter, Usage

    meter, start = Meter(llm.report.block_size), time.perf_counter()

    def on_step(outputs: Sequence[RequestOutput], stats: StepStats | None) -> None:
        for output in outputs:
            watch(output)
        if stats is not None:
            meter.add(stats)

    with display, closing(llm):
        outputs = llm.run(requests, on_step=on_step)
    return outputs, Usage.of(outputs, meter, llm.report.num_blocks, time.perf_counter() - start)


def _status(outputs: Sequence[RequestOutput]) -> int:
    failed = any(sample.finish_reason == "error" for o in outputs for sample in o.outputs)
    return FAILED if failed else 0
