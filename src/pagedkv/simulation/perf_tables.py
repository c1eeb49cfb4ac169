"""Costs of steps from published measurements, in the two formats that simulators have shared.

Both were measured on whole prompts and on decodes alone, never on steps that mix chunks of prompts
with decodes; what a mixed step takes is a rule of ours, stated with each class. A row of one token
is a decode, every other row is a chunk of a prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.errors import ConfigError
from pagedkv.scheduling.step import Step
from pagedkv.simulation.executor import StepCost
from pagedkv.simulation.rows import Rows

Float64 = npt.NDArray[np.float64]

_PHASES = ("prefill", "decoding_smallbs", "decoding_largebs")
_MOST = 2**31  # of devices, tokens, batches


@dataclass(frozen=True, slots=True)
class DistServeCost:
    """The fits of DistServe's simulator (Zhong et al., OSDI 2024), in seconds.

    Prefill: c0 + c1 * sum(length) + c2 * sum(length**2). Decode step: c0 + c1 * sum(context) +
    c2 * batch, with one set of coefficients below `threshold` decodes and another from it on.

    A chunk that continues a prompt after p tokens up to length n counts n**2 - p**2, so that the
    chunks of a prompt add up to what it takes in one piece. In a mixed step the larger of the two
    constants counts, once: they stand for reading the weights.
    """

    prefill: tuple[float, float, float]
    small: tuple[float, float, float]
    large: tuple[float, float, float]
    threshold: float

    def seconds(self, step: Step) -> float:
        counts = step.query_lens.astype(np.int64)
        contexts = step.context_lens.astype(np.int64)
        decodes = counts == 1
        batch = int(decodes.sum())
        base = variable = 0.0
        if batch < len(counts):
            chunks, ends = counts[~decodes], contexts[~decodes]
            base, per_token, per_square = self.prefill
            squares = int((chunks * (2 * ends - chunks)).sum())
            variable += per_token * int(chunks.sum()) + per_square * squares
        if batch:
            c0, per_context, per_row = self.small if batch < self.threshold else self.large
            base = max(base, c0)
            variable += per_context * int(contexts[decodes].sum()) + per_row * batch
        return base + variable


@dataclass(slots=True)
class SplitwiseCost:
    """Measured points as of Splitwise's simulator (Patel et al., ISCA 2024), in seconds.

    Between points the time is interpolated on a straight line: of a prefill over all its prompt
    tokens (prompt size * batch size), of a decode step over its batch size; where a table has
    several points for one of these, their median counts. Context is not in the table and costs
    nothing more, nor does what a chunk of a prompt continues.

    Nothing is extrapolated: below the smallest point a step takes as long as that point; beyond the
    largest it goes at the rate of that point (twice the tokens take twice the time). Such steps are
    counted in `steps_outside`.

    A mixed step takes the prefill's time and what its decodes take more than a single one, since
    weights are read once; the decodes' own time at least.
    """

    prompts: tuple[Float64, Float64]  # tokens, ascending; seconds
    decodes: tuple[Float64, Float64]  # batch size, ascending; seconds
    steps_outside: int = 0

    def seconds(self, step: Step) -> float:
        batch = int((step.query_lens == 1).sum())
        tokens = step.num_tokens - batch
        self.steps_outside += _outside(self.prompts, tokens) or _outside(self.decodes, batch)
        decode = _at(self.decodes, batch) if batch else 0.0
        if not tokens:
            return decode
        more = max(0.0, decode - float(self.decodes[1][0]))
        return max(decode, _at(self.prompts, tokens) + more)


def _outside(points: tuple[Float64, Float64], x: int) -> bool:
    return bool(x) and not points[0][0] <= x <= points[0][-1]


def _at(points: tuple[Float64, Float64], x: int) -> float:
    xs, ys = points
    if x > xs[-1]:
        return float(ys[-1] * x / xs[-1])
    return float(np.interp(x, xs, ys))


def read_cost(
    path: str | Path,
    model: str,
    hardware: str | None = None,
    tensor_parallel: int | None = None,
) -> StepCost:
    """The cost of one model on one machine, from a table of either format.

    Columns of the one: model, tp, phase, c0, c1, c2, large_small_bs_threshold (milliseconds; one
    hardware a file). Of the other: model, hardware, tensor_parallel, prompt_size, batch_size,
    prompt_ms_median, token_ms_median. `hardware` and `tensor_parallel` may be None where they leave
    no choice. ConfigError names a wrong line; for what is not there, what is.
    """
    rows = Rows(path, "performance table")
    if "phase" in rows.names:
        if hardware is not None:
            raise ConfigError(f"hardware={hardware!r}: {path} does not say which: leave it out")
        return _distserve(rows, _choose(rows, {"model": model, "tp": tensor_parallel}))
    wanted = {"model": model, "hardware": hardware, "tensor_parallel": tensor_parallel}
    return _splitwise(rows, _choose(rows, wanted))


def _choose(rows: Rows, wanted: dict[str, Any]) -> list[int]:
    """Lines of the entry that is wanted. None in `wanted`: any, where there is one alone."""
    columns = [dict(rows.column(name)) for name in wanted]
    entries = {line: tuple(str(column[line]) for column in columns) for line, _ in rows.rows}
    found = {
        entry
        for entry in entries.values()
        if all(w is None or str(w) == has for w, has in zip(wanted.values(), entry, strict=True))
    }
    if len(found) != 1:
        asked = ", ".join(f"{name}={w!r}" for name, w in wanted.items() if w is not None)
        fault = "is more than one entry" if found else "is no entry"
        listed = "; ".join(sorted(" ".join(entry) for entry in found or set(entries.values())))
        raise ConfigError(f"{asked} {fault} of {rows.path}: give {', '.join(wanted)} of {listed}")
    return [line for line, entry in entries.items() if entry in found]


def _distserve(rows: Rows, lines: list[int]) -> DistServeCost:
    fits: dict[str, tuple[float, float, float]] = {}
    threshold = 0.0
    values = {name: dict(rows.column(name)) for name in ("phase", "c0", "c1", "c2")}
    thresholds = dict(rows.column("large_small_bs_threshold"))
    for line in lines:
        phase = values["phase"][line]
        if phase not in _PHASES or phase in fits:
            rows.refuse(line, f"phase={phase!r} must be one of {', '.join(_PHASES)}, each once")
        c0, c1, c2 = (
            rows.number(line, name, values[name][line]) / 1e3 for name in ("c0", "c1", "c2")
        )
        fits[phase] = c0, c1, c2
        threshold = rows.number(line, "large_small_bs_threshold", thresholds[line])
    if missing := [phase for phase in _PHASES if phase not in fits]:
        raise ConfigError(f"{rows.path} has no row of phase {missing[0]!r} for this model")
    prefill, small, large = (fits[phase] for phase in _PHASES)
    return DistServeCost(prefill, small, large, threshold)


def _splitwise(rows: Rows, lines: list[int]) -> SplitwiseCost:
    columns = {
        name: dict(rows.column(name))
        for name in ("prompt_size", "batch_size", "prompt_ms_median", "token_ms_median")
    }

    def count(line: int, name: str) -> int:
        return rows.whole(line, name, columns[name][line], 1, _MOST)

    def seconds(line: int, name: str) -> float:
        return rows.number(line, name, columns[name][line]) / 1e3

    return SplitwiseCost(
        _medians(
            lines,
            lambda line: count(line, "prompt_size") * count(line, "batch_size"),
            lambda line: seconds(line, "prompt_ms_median"),
        ),
        _medians(
            lines,
            lambda line: count(line, "batch_size"),
            lambda line: seconds(line, "token_ms_median"),
        ),
    )


def _medians(
    lines: Iterable[int], x: Callable[[int], int], y: Callable[[int], float]
) -> tuple[Float64, Float64]:
    points: defaultdict[int, list[float]] = defaultdict(list)
    for line in lines:
        points[x(line)].append(y(line))
    ascending = sorted(points)
    medians = [float(np.median(points[place])) for place in ascending]
    return np.array(ascending, np.float64), np.array(medians)
