"""Request traces: arrivals, lengths, tenants and the ids of their blocks, from CSV or JSON lines.

Columns (or keys): `prompt_tokens`, `output_tokens`; one of `arrival_s`, `arrival_ms` for requests
that are sorted by arrival, neither for those that come in the order of the file; `tenant`; and
`block<B>_ids`, the prompt's blocks of B tokens: an id stands for a block and all before it. Ids are
run-length coded text ("0-3 7" is 0, 1, 2, 3, 7) or, in JSON, a list. Other columns are left alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.errors import ConfigError
from pagedkv.simulation.rows import Rows

_BLOCK_COLUMN = re.compile(r"block(\d+)_ids")
_RUN = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")
MAX_COUNT = 2**31  # of tokens, exclusive
_MAX_ID = 2**30  # of blocks, exclusive

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trace:
    """n requests in the order of their arrival."""

    arrivals: npt.NDArray[np.float64] | None  # seconds, [n]; None: not known
    prompt_tokens: Int64  # [n]
    output_tokens: Int64  # [n]
    tenants: tuple[str, ...] | None  # [n]
    block_size: int | None  # tokens a block of `block_ids`
    block_ids: tuple[Int64, ...] | None  # [n]

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def first(self, n: int) -> Trace:
        """The first n requests, or all if there are fewer. ConfigError if n < 1."""
        if n < 1:
            raise ConfigError(f"requests={n}: give at least 1")
        return Trace(
            None if self.arrivals is None else self.arrivals[:n],
            self.prompt_tokens[:n],
            self.output_tokens[:n],
            None if self.tenants is None else self.tenants[:n],
            self.block_size,
            None if self.block_ids is None else self.block_ids[:n],
        )

    def at_speed(self, speed: float) -> Trace:
        """The same requests `speed` times as fast: 2.0 halves the time between arrivals.

        ConfigError for a speed that is not above 0, or with which the last arrival would be past
        what a clock counts, and if arrivals are not known.
        """
        if not 0 < speed < np.inf:
            raise ConfigError(f"speed={speed}: give more than 0")
        if self.arrivals is None:
            raise ConfigError(f"speed={speed}: the trace does not say when its requests arrive")
        if len(self) and self.arrivals[-1] >= 2**53 * speed:  # as for what is read
            raise ConfigError(f"speed={speed}: the last request would come past 2**53 s: give more")
        return replace(self, arrivals=self.arrivals / speed)


def read_trace(path: str | Path) -> Trace:
    """Reads a trace. ConfigError names the line and the value that cannot be right."""
    rows = Rows(path, "trace")
    prompts, outputs = _counts(rows, "prompt_tokens", 1), _counts(rows, "output_tokens", 0)
    arrivals = _arrivals(rows)
    tenants = None
    if "tenant" in rows.names:
        tenants = tuple(str(value) for _, value in rows.column("tenant"))
    column = next((name for name in rows.names if _BLOCK_COLUMN.fullmatch(str(name))), None)
    size, ids = None, None
    if column is not None:
        digits = column.removeprefix("block").removesuffix("_ids")
        size = int(digits) if len(digits) < 10 else 0
        if not size:
            raise ConfigError(
                f"trace {path} has a column {column!r}: blocks have 1 to 10**9 - 1 tokens"
            )
        ids = tuple(
            _ids(rows, line, value, -(-tokens // size))
            for (line, value), tokens in zip(rows.column(column), prompts.tolist(), strict=True)
        )
    order = np.arange(len(prompts))
    if arrivals is not None:
        order = np.argsort(arrivals, kind="stable")
    return Trace(
        None if arrivals is None else arrivals[order],
        prompts[order],
        outputs[order],
        None if tenants is None else tuple(tenants[i] for i in order.tolist()),
        size,
        None if ids is None else tuple(ids[i] for i in order.tolist()),
    )


def _arrivals(rows: Rows) -> npt.NDArray[np.float64] | None:
    for name, seconds in (("arrival_s", 1.0), ("arrival_ms", 1e-3)):
        if name in rows.names:
            values = [rows.number(line, name, value) for line, value in rows.column(name)]
            return np.array(values) * seconds
    return None


def _counts(rows: Rows, name: str, least: int) -> Int64:
    counts = [rows.whole(line, name, value, least, MAX_COUNT) for line, value in rows.column(name)]
    return np.array(counts, np.int64)


def _ids(rows: Rows, line: int, value: Any, blocks: int) -> Int64:
    """Ids of the prompt's `blocks` blocks; what a run says beyond them is left out."""
    if isinstance(value, list):
        if not all(type(i) is int and 0 <= i < _MAX_ID for i in value):
            rows.refuse(line, f"block ids {str(value)[:60]!r} must be whole numbers in [0, 2**30)")
        return np.array(value, np.int64)
    runs = []
    for item in str(value).split():
        match = _RUN.fullmatch(item)
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not first <= last < _MAX_ID:
            rows.refuse(line, f"block ids {item!r} are neither n nor a-b in [0, 2**30)")
        run = np.arange(first, min(last + 1, first + blocks))
        runs.append(run)
        blocks -= len(run)
    return np.concatenate(runs) if runs else np.zeros(0, np.int64)
