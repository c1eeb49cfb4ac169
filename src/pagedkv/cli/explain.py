"""`pagedkv explain`: a decision log in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from pagedkv.engine.json_lines import DECISIONS, read_lines
from pagedkv.engine.recording import INPUTS, MESSAGES, RECORDING
from pagedkv.errors import ConfigError
from pagedkv.scheduling.decisions import STEP, Decision
from pagedkv.scheduling.explain import describe
from pagedkv.scheduling.explain import explain as tell


def explain(
    log: Annotated[
        Path, typer.Argument(help="Written by --decision-log or --record.", metavar="LOG")
    ],
    request: Annotated[str, typer.Argument(help="Id of the request.", metavar="REQUEST")],
) -> None:
    """Say in words why a request waited, was preempted, or ended."""
    print(tell(_entries(log), request))


def _entries(log: Path) -> Iterator[Decision]:
    """All decisions; ConfigError names the line that is none."""
    inputs = {*INPUTS, *MESSAGES}
    for number, values in read_lines(log, DECISIONS, RECORDING):
        if len(values) == 1 and values.keys() <= inputs:
            continue
        try:
            entry = Decision.of(values)
            if entry.kind != STEP:
                describe(entry)
        except ValueError as error:
            raise ConfigError(f"{log}, line {number}: {error}") from error
        yield entry
