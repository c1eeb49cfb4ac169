"""How `pagedkv bench` prints what was measured: names and values, and the machine beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from pagedkv.bench.calibration import Calibration
    from pagedkv.bench.limits import Limits


def print_facts(
    facts: Mapping[str, Any],
    rows: Sequence[Sequence[str]],
    notes: Sequence[object],
    as_json: bool,
    head: Sequence[str] = (),
) -> None:
    """One JSON object of the facts, or a table of the rows with the notes below."""
    if as_json:
        print(json.dumps(facts))
        return
    table = Table(*head, box=None, padding=(0, 2, 0, 0), show_header=bool(head))
    for column in table.columns[1:]:
        column.justify = "right" if head else "left"
    if not head:
        for _ in rows[0]:
            table.add_column()
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    for note in notes:
        console.print(str(note), style="dim", markup=False)


def limit_facts(limits: Limits) -> dict[str, float]:
    return {
        "read_gb_per_s": limits.read_bandwidth / 1e9,
        "matrix_gflop_per_s": limits.matrix_rate / 1e9,
    }


def calibration_facts(calibration: Calibration) -> dict[str, float]:
    return {
        "python_loop_ns": calibration.python_loop_ns,
        "copy_gb_per_s": calibration.copy_gb_per_s,
    }
