"""A bar of requests that have ended."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def request_bar(total: int, console: Console) -> tuple[Progress, Callable[[], None]]:
    """The bar, to be entered, and what is called when one more has ended.

    It is shown only where there is a terminal, and is gone at its end.
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("requests", total=total)
    return bar, lambda: bar.advance(task)
