"""`pagedkv generate`: prompts in, text out, and what it cost."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pagedkv.cli.main import FAILED
from pagedkv.cli.prompts import parse_bytes, read_prompts
from pagedkv.errors import RequestError
from pagedkv.scheduling.messages import StepStats
from pagedkv.scheduling.params import SamplingParams

if TYPE_CHECKING:  # torch takes seconds to import: not for `--help` or a wrong option
    from pagedkv.cli.usage import Usage
    from pagedkv.engine.llm import LLM
    from pagedkv.engine.output import RequestOutput
    from pagedkv.engine.requests import Prepared, Prompt


def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts; without any: --file, else stdin.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="File with one prompt a line.")] = None,
    model: Annotated[
        str, typer.Option(help="Embedded model, Hugging Face folder, or hub id.")
    ] = "smollm2-135m-instruct",
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Whether prompts go through the chat template. Default: if the model has one.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a sample.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Best k tokens; 0 is off.")] = 0,
    seed: Annotated[int, typer.Option(help="Sample i is drawn with seed + i.")] = 0,
    n: Annotated[int, typer.Option("-n", help="Samples a prompt.")] = 1,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens a block.")] = 16,
    num_blocks: Annotated[int | None, typer.Option(help="Blocks of the pool.")] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="Memory of the pool: bytes, 512MiB, 2GB.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and output together.")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="Attention: auto, native, gather or reference.")
    ] = "auto",
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Print text as it comes. Default: for one sample of one prompt, without --json.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
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
        n=n, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens
    )
    kv_cache_memory = parse_bytes(kv_memory)
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
        attention_backend=backend,
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character
    questions: list[Prompt] = list(texts)
    if llm.engine.has_chat_template if chat is None else chat:
        questions = [llm.engine.chat_prompt([{"role": "user", "content": t}]) for t in texts]
    requests = llm.prepare(questions, params)
    console = Console(stderr=True, highlight=False)
    if as_json:
        outputs, usage = _run(llm, requests, nullcontext(), lambda output: None)
        print(show.as_json(llm.report, outputs, texts, usage))
        return _status(outputs)
    for line in llm.report.lines():
        console.print(line, style="dim", markup=False, soft_wrap=True)
    if can_stream and stream is not False:
        outputs, usage = _run(llm, requests, nullcontext(), show.stream_text())
    else:
        outputs, usage = _run(llm, requests, *show.progress_bar(len(texts), console))
        show.print_texts(outputs, texts)
    show.print_problems(outputs, console)
    console.print(usage.table(llm.report.max_model_len))
    return _status(outputs)


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

    with display:
        outputs = llm.run(requests, on_step=on_step)
    return outputs, Usage.of(outputs, meter, llm.report.num_blocks, time.perf_counter() - start)


def _status(outputs: Sequence[RequestOutput]) -> int:
    failed = any(sample.finish_reason == "error" for o in outputs for sample in o.outputs)
    return FAILED if failed else 0
