"""`pagedkv replay`: the calls of a replay log again, without the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagedkv.cache.sanitizer.replay import replay
from pagedkv.cli.main import FAILED
from pagedkv.errors import ConfigError


def replay_log(
    file: Annotated[Path, typer.Argument(help="Written by --replay-log.", metavar="FILE")],
) -> int:
    """Make the calls of a replay log again and print the error they lead to.

    Exit status: 1 if they lead to an error, 0 if they do not.
    """
    try:
        outcome = replay(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    if outcome.reproduced:
        print(f"call {outcome.num_calls} leads to what was recorded:\n{outcome.recorded}")
        return FAILED
    if outcome.error is not None:
        print(f"call {outcome.num_calls} leads to:\n{outcome.error}")
        if outcome.recorded is not None:
            print(f"recorded was another error:\n{outcome.recorded}")
        return FAILED
    if outcome.recorded is None:
        print("no error was recorded: the calls are written when the sanitizer finds one")
        return 0
    print(
        f"{outcome.num_calls} calls lead to no error\nrecorded was: {outcome.recorded}\n"
        "what it rests on is not in the log (the K/V itself)"
    )
    return 0
