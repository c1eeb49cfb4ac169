"""`pagedkv simulate replay`: a recorded run again, without the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagedkv.cli.main import FAILED
from pagedkv.simulation.replay_run import replay_run


def replay(
    file: Annotated[Path, typer.Argument(help="Written by generate --record.", metavar="FILE")],
) -> int:
    """Give the scheduler what a recorded run gave it, and compare every decision.

    Exit status: 1 if one differs.
    """
    run = replay_run(file)
    what = f"{run.num_requests:,} requests, {run.num_steps:,} steps, {run.num_decisions:,} entries"
    if run.difference is None:
        end = "; the recording was not closed" if run.cut_off else ""
        print(f"{what}: identical, block ids included{end}")
        return 0
    nothing = "nothing"
    print(
        f"{what} are identical; the next differs ({file}, line {run.difference.line})\n"
        f"recorded: {run.difference.recorded or nothing}\n"
        f"replayed: {run.difference.replayed or nothing}"
    )
    return FAILED
