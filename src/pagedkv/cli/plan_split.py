"""`pagedkv plan --ttft --tpot`: whether to split prefill from decode, and how."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pagedkv.cli.costs import Line, step_cost
from pagedkv.cli.workload import find_trace
from pagedkv.errors import ConfigError
from pagedkv.simulation.capacity import Capacity
from pagedkv.simulation.closed_form import ClosedForm, Device
from pagedkv.simulation.objective import Objective
from pagedkv.simulation.split import Rates, best_split, splits
from pagedkv.simulation.trace import read_trace


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """Options as they were given; None: left out."""

    ttft: float | None
    tpot: float | None
    share: float
    trace: Path | None
    devices: int
    network_gb: float
    max_num_seqs: int
    line: Line
    perf_table: Path | None
    table_model: str | None
    hardware: str | None
    tp: int | None

    @property
    def asked(self) -> bool:
        given = (self.ttft, self.tpot, self.trace, self.perf_table)
        return any(option is not None for option in given) or bool(self.line.given())


def read_rates(text: str) -> Rates:
    """PREFILL,DECODE,BOTH. ConfigError for anything else."""
    try:
        prefill, decode, both = map(float, text.split(","))
    except ValueError:
        raise ConfigError(
            f"--rates={text!r} must be requests a second of a device: prefilling alone, decoding "
            "alone, doing both, such as 5.6,10,1.6"
        ) from None
    return Rates(prefill, decode, both)


def plan_split(options: SplitOptions, capacity: Capacity) -> dict[str, Any]:
    """What the requests of a trace make of it. ConfigError for options that are missing."""
    if options.ttft is None or options.tpot is None or options.trace is None:
        given = {"--ttft": options.ttft, "--tpot": options.tpot, "--trace": options.trace}
        missing = next(option for option, value in given.items() if value is None)
        raise ConfigError(f"{missing} is needed too, to plan a split")
    if not 0 < options.network_gb < np.inf:
        raise ConfigError(f"--network-gb={options.network_gb}: give more than 0")
    objective = Objective(options.ttft, options.tpot, options.share)
    cost = step_cost(
        options.line, options.perf_table, options.table_model, options.hardware, options.tp
    )
    trace = read_trace(find_trace(options.trace))
    device = Device(
        cost,
        capacity.num_blocks * capacity.block_size,
        options.max_num_seqs,
        capacity.shape.token_bytes / (options.network_gb * 1e9),
    )
    form = ClosedForm(trace, device, objective)
    facts = split_facts(form.rates(), options.devices)
    facts["rates"]["colocated_budget"] = form.colocated().budget
    arrivals = trace.arrivals
    if arrivals is not None and arrivals[-1] > arrivals[0]:
        facts["trace_rate"] = (len(trace) - 1) / float(arrivals[-1] - arrivals[0])
    return facts


def split_facts(rates: Rates, devices: int) -> dict[str, Any]:
    """The answer, as JSON has it."""
    best = best_split(rates, devices)
    return {
        "rates": asdict(rates),
        "split": best.goodput > rates.colocated,
        "best": asdict(best),
        "splits": [asdict(split) for split in splits(rates, devices)],
    }


def print_split(facts: dict[str, Any], console: Console) -> None:
    """The same in words."""
    rates, best = facts["rates"], facts["best"]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("prefilling alone", _rate(rates["prefill"]))
    table.add_row("decoding alone", _rate(rates["decode"]))
    budget = rates.get("colocated_budget")
    steps = f", steps of {budget:,} tokens" if budget and rates["colocated"] else ""
    table.add_row("doing both", _rate(rates["colocated"]) + steps)
    if "trace_rate" in facts:
        table.add_row("the trace as recorded", _rate(facts["trace_rate"]))
    console.print("what a device bears", style="italic")
    console.print(table)
    options = Table(title="splits, and what they give")
    for name in ("devices", "prefill", "decode", "requests/s a device", "against both in one"):
        options.add_column(name, justify="right")
    for split in facts["splits"]:
        options.add_row(
            str(split["prefill"] + split["decode"]),
            str(split["prefill"]),
            str(split["decode"]),
            f"{split['goodput']:.2f}",
            _against(split["goodput"], rates["colocated"]),
        )
    console.print(options)
    how = f"{best['prefill']} prefill + {best['decode']} decode"
    gives = f"{best['goodput']:.2f} requests/s a device"
    if facts["split"]:
        console.print(f"split: {how} give {gives}, against {rates['colocated']:.2f} in one")
    elif rates["colocated"]:
        console.print(
            f"do not split: a device that does both bears {rates['colocated']:.2f} requests/s; "
            f"{how} would give {gives}"
        )
    else:
        console.print("neither way can any load be borne: the targets are below what a step takes")


def _rate(value: float) -> str:
    return f"{value:.2f} requests/s"


def _against(goodput: float, colocated: float) -> str:
    return f"{goodput / colocated:.2f}x" if colocated else "-"
