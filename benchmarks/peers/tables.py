"""The comparison as people read it, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from peers.compare import Comparison
from peers.engines import Setting
from peers.workloads import Workload

# How many times as fast as the best peer we want to be.
REQUIRED: Mapping[str, float] = MappingProxyType(
    {"W1": 1.3, "W2": 1.25, "W3": 1.5, "W4": 1.2, "W5": 1.0}
)


def speed_table(
    comparison: Comparison,
    workloads: Mapping[str, Workload],
    floors: Mapping[str, float],
    ours: str,
) -> list[str]:
    """A line a workload; each engine with its best setting, by the median.

    floors: seconds by workload. ours: the engine that the others are compared with. A ratio below
    the required one is followed by "!".
    """
    engines = comparison.engines
    head = ["", "unit", *engines, "best peer", "ratio", "required", "floor", "share of floor"]
    rows = [head]
    for name, workload in workloads.items():
        best = {e: s for e in engines if (s := comparison.best(name, e)) is not None}
        seconds = {engine: comparison.seconds(name, best[engine]) for engine in best}
        rival = min(best.keys() - {ours}, key=lambda engine: seconds[engine], default=None)
        ratio = None
        if rival is not None and ours in best:
            ratio = comparison.ratio(name, best[ours], best[rival])
        rows.append(
            [
                f"{name} {workload.title}",
                "s" if workload.in_seconds else "tokens/s",
                *(speed(workload, seconds.get(engine)) for engine in engines),
                rival or "-",
                "-" if ratio is None else f"{ratio:.2f}{'!' if ratio < REQUIRED[name] else ' '}",
                f"{REQUIRED[name]:.2f}",
                speed(workload, floors[name]),
                f"{floors[name] / seconds[ours]:.0%}" if ours in seconds else "-",
            ]
        )
    return columns(rows)


def speed(workload: Workload, seconds: float | None) -> str:
    """Output tokens a second, or seconds where these count."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f}" if workload.in_seconds else f"{workload.output_tokens / seconds:.1f}"


def settings_tables(comparison: Comparison, workloads: Mapping[str, Workload]) -> list[str]:
    """Of every setting: seconds (* is its engine's best), memory (* is the leanest), agreement."""
    seconds = [["seconds: median (least-most)", *workloads]]
    memory = [["peak memory, MiB", *workloads]]
    equal = [["output tokens equal to ours, up to the first difference", *workloads]]
    for setting in dict.fromkeys(s for runs in comparison.runs.values() for s in runs):
        for table in (seconds, memory, equal):
            table.append([str(setting)])
        for name in workloads:
            runs = comparison.runs[name].get(setting, [])
            times = [run.seconds for run in runs]
            star = "*" if comparison.best(name, setting.engine) is setting else ""
            alike = [run.alike for run in runs if run.alike is not None]
            seconds[-1].append(
                f"{star}{comparison.seconds(name, setting):.2f} ({min(times):.2f}-{max(times):.2f})"
                if runs
                else "-"
            )
            peak = comparison.peak_bytes(name, setting)
            star = "*" if peak == comparison.leanest(name) else ""
            memory[-1].append("-" if peak is None else f"{star}{peak / 2**20:.0f}")
            equal[-1].append(f"{sum(alike) / len(alike):.0%}" if alike else "-")
    return [*columns(seconds), "", *columns(memory), "", *columns(equal)]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in plain text, its first column to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def as_json(
    comparison: Comparison,
    workloads: Mapping[str, Workload],
    floors: Mapping[str, float],
    info: Mapping[Setting, Mapping[str, str]],
) -> dict[str, Any]:
    return {
        "workloads": {
            name: {
                "title": workload.title,
                "output_tokens": workload.output_tokens,
                "floor_seconds": floors[name],
                "required_ratio": REQUIRED[name],
                "runs": [
                    {
                        "engine": setting.engine,
                        "setting": setting.name,
                        "best": comparison.best(name, setting.engine) is setting,
                        "rounds": [asdict(run) for run in runs],
                    }
                    for setting, runs in comparison.runs[name].items()
                ],
            }
            for name, workload in workloads.items()
        },
        "settings": [
            {
                "engine": setting.engine,
                "setting": setting.name,
                "options": dict(setting.options),
                "environment": dict(setting.environment),
                "info": dict(said),
            }
            for setting, said in info.items()
        ],
        "failed": {str(setting): why for setting, why in comparison.failed.items()},
    }
