"""The commands and how their arguments are read."""

from __future__ import annotations

import typer

from pagedkv.cli.generate import generate
from pagedkv.cli.main import INTERRUPTED
from pagedkv.errors import PagedKVError


class UsageError(PagedKVError):
    """The command line itself is wrong: an unknown option, a value of the wrong type."""


def invoke(args: list[str]) -> int:
    """Runs one command and returns its exit status. Raises UsageError instead of printing help."""
    app = typer.Typer(
        name="pagedkv",
        help="LLM serving on a paged KV cache.",
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.command()(generate)
    app.callback()(_callback)  # keeps `generate` a command of its own while it is the only one
    command = typer.main.get_command(app)
    try:
        status = command.main(args or ["--help"], prog_name="pagedkv", standalone_mode=False)
    except typer.Abort:  # what older versions make of an interrupt
        raise KeyboardInterrupt from None
    except Exception as error:
        # Usage errors of click, which typer has, depending on its version, inside or beside it.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        raise UsageError(f"{message()} (see pagedkv --help)") from error
    if status == INTERRUPTED:  # what newer versions make of it
        raise KeyboardInterrupt
    return status if isinstance(status, int) else 0


def _callback() -> None:
    """LLM serving on a paged KV cache."""
