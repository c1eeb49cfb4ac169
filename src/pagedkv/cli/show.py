"""Printing results: streamed, one after the other, or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict

import msgspec
from rich.console import Console

from pagedkv.cli.progress import request_bar
from pagedkv.cli.prompts import PromptText
from pagedkv.cli.terminal import printable
from pagedkv.cli.usage import Usage
from pagedkv.engine.memory import StartupReport
from pagedkv.engine.output import RequestOutput
from pagedkv.scheduling.tiering import TieringStats

Watch = Callable[[RequestOutput], None]


def stream_text() -> Watch:
    """Prints the first sample's text as it grows."""
    shown = 0

    def watch(output: RequestOutput) -> None:
        nonlocal shown
        text = output.outputs[0].text
        sys.stdout.write(printable(text[shown:]) + ("\n" if output.finished else ""))
        sys.stdout.flush()
        shown = len(text)

    return watch


def progress_bar(total: int, console: Console) -> tuple[AbstractContextManager[object], Watch]:
    """A bar of finished requests, where there is a terminal to show it on."""
    bar, advance = request_bar(total, console)

    def watch(output: RequestOutput) -> None:
        if output.finished:
            advance()

    return bar, watch


def print_texts(outputs: Sequence[RequestOutput], prompts: Sequence[PromptText]) -> None:
    """All samples; a heading names prompt and sample where there are several."""
    for output, prompt in zip(outputs, prompts, strict=True):
        for sample in output.outputs:
            if len(outputs) > 1 or len(output.outputs) > 1:
                which = f" [{sample.index}]" if len(output.outputs) > 1 else ""
                print(f"==> {printable(prompt.text)}{which}")
            print(printable(sample.text))


def print_problems(
    outputs: Sequence[RequestOutput], prompts: Sequence[PromptText], console: Console
) -> None:
    """Why samples failed or were cut short."""
    for output, prompt in zip(outputs, prompts, strict=True):
        for sample in output.outputs:
            if sample.error is not None:
                line = f"{prompt.place}, sample {sample.index}: {sample.error}"
                console.print(line, style="yellow", markup=False, soft_wrap=True)


def as_json(
    report: StartupReport,
    outputs: Sequence[RequestOutput],
    prompts: Sequence[PromptText],
    usage: Usage,
    cost: dict[str, float],
    tiering: TieringStats | None,
    tier_off: str | None,
) -> str:
    """One object: what ran, a result a prompt, the totals, what steps take and tiers have moved.

    tier_off: see `Tier.off`.
    """
    results = [
        {
            "prompt": prompt.text,
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_tokens": output.num_cached_tokens,
            "completion_tokens": sum(len(sample.token_ids) for sample in output.outputs),
            "seed": output.seed,
            "queue_time": output.metrics.queue_time,
            "ttft": output.metrics.ttft,
            "outputs": [msgspec.to_builtins(sample) for sample in output.outputs],
        }
        for output, prompt in zip(outputs, prompts, strict=True)
    ]
    engine = asdict(report) | {
        "longest_context": report.longest_context,
        "concurrency": report.concurrency,
    }
    moved = None if tiering is None else asdict(tiering) | {"off": tier_off}
    totals = {"usage": asdict(usage), "cost": cost, "tiers": moved}
    return json.dumps({"engine": engine, "results": results, **totals})
