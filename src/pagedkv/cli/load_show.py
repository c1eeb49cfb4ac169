"""Printing and saving the result of a load test."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pagedkv.errors import ConfigError
from pagedkv.loadtest.metrics import percentile_name

_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token after it",
    "itl": "time between chunks",
    "e2el": "until the last token",
}
_TOTALS = (
    ("completed", "requests completed", ","),
    ("failed", "requests failed", ","),
    ("max_concurrent_requests", "most at once", ","),
    ("duration", "seconds", ",.2f"),
    ("total_input_tokens", "input tokens", ","),
    ("total_cached_tokens", "of these from the prefix cache", ","),
    ("total_output_tokens", "output tokens", ","),
    ("request_throughput", "requests/s", ",.2f"),
    ("request_goodput", "good requests/s", ",.2f"),
    ("slo_attainment", "good requests", ".1%"),
    ("output_throughput", "output tokens/s", ",.1f"),
    ("total_token_throughput", "tokens/s", ",.1f"),
)


def print_result(
    result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]
) -> None:
    """Totals, latencies, a row for each tenant and SLO class, failures, the generator."""
    console = Console(highlight=False)
    totals = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, words, form in _TOTALS:
        if result[name] is not None:
            totals.add_row(words, format(result[name], form))
    console.print(totals)
    statistics = ["mean", "median", "std", *(percentile_name(p) for p in percentiles)]
    latencies = _table("milliseconds", statistics)
    for metric in metrics:
        values = [_ms(result[f"{name}_{metric}_ms"]) for name in statistics]
        latencies.add_row(f"{_NAMES[metric]} ({metric.upper()})", *values)
    console.print(latencies)
    for kind, heading in (("tenants", "tenant"), ("slo_classes", "SLO class")):
        if result[kind]:
            console.print(_groups(heading, result[kind], metrics, percentiles[-1]))
    for reason, count in result["failures"].items():
        console.print(f"{count:,} failed: {reason}", style="yellow", markup=False, soft_wrap=True)
    facts = result["generator"]
    line = (
        f"generator: requests {facts['p99_lateness_ms']:.1f} ms late (P99; at most "
        f"{facts['max_lateness_ms']:.1f}), its loop {facts['p99_lag_ms']:.1f} ms (P99)"
    )
    if result["generator_kept_up"]:
        console.print(line, style="dim", soft_wrap=True)
    else:
        line += ": it could not keep up, and latencies have its own waiting in them"
        console.print(line, style="yellow", soft_wrap=True)


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """ConfigError if the file cannot be written."""
    try:
        path.write_text(json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"the result {path} cannot be written: {error.strerror}") from error


def _groups(
    heading: str,
    groups: Mapping[str, Mapping[str, Any]],
    metrics: Sequence[str],
    percentile: float,
) -> Table:
    p = percentile_name(percentile)
    columns = [f"{p.upper()} {metric.upper()}" for metric in metrics]
    table = _table(heading, ["completed", "failed", "good", "output tokens/s", *columns])
    for name, figures in groups.items():
        good = figures["slo_attainment"]
        table.add_row(
            name,
            f"{figures['completed']:,}",
            f"{figures['failed']:,}",
            "" if good is None else f"{good:.1%}",
            f"{figures['output_throughput']:,.1f}",
            *(_ms(figures[f"{p}_{metric}_ms"]) for metric in metrics),
        )
    return table


def _table(first: str, columns: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"
