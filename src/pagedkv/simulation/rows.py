"""Rows of a CSV file or of JSON lines, and which line is to blame for what is wrong."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from pagedkv.errors import ConfigError


class Rows:
    """A file with a header (or keys) and at least one row; `.jsonl` is JSON lines, else CSV.

    `what` is what messages call it. ConfigError if it cannot be read as that.
    """

    def __init__(self, path: str | Path, what: str) -> None:
        self.path, self.what = Path(path), what
        self.rows = self._read()  # (line, row)
        self.names = list(self.rows[0][1])

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> Iterator[tuple[int, Any]]:
        """Line and value of each row. ConfigError if there is no such column, or no value."""
        if name not in self.names:
            raise ConfigError(
                f"{self.what} {self.path} has no column {name!r}: it has {self.names}"
            )
        for line, row in self.rows:
            if row.get(name) is None:
                self.refuse(line, f"{name} is missing")
            yield line, row[name]

    def number(self, line: int, name: str, value: Any) -> float:
        """A finite number from 0. ConfigError otherwise."""
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            self.refuse(line, f"{name}={value!r} is no number")
        if not 0 <= number < 2**53:
            self.refuse(line, f"{name}={value!r} must be finite and at least 0, less than 2**53")
        return number

    def whole(self, line: int, name: str, value: Any, least: int, limit: int) -> int:
        """A whole number in [least, limit). ConfigError otherwise."""
        number = self.number(line, name, value)
        if number != int(number) or not least <= number < limit:
            self.refuse(line, f"{name}={value!r} must be a whole number from {least}")
        return int(number)

    def refuse(self, line: int, why: str) -> NoReturn:
        raise ConfigError(f"{self.path}, line {line}: {why}")

    def _read(self) -> list[tuple[int, dict[str, Any]]]:
        where = f"{self.what} {self.path}"
        try:
            with self.path.open(encoding="utf-8-sig", newline="") as lines:
                as_json = self.path.suffix == ".jsonl"
                rows = list(self._json_rows(lines) if as_json else _csv_rows(lines))
        except OSError as error:
            raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
        except (UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"{where} is no CSV text: {error}") from error
        if not rows:
            raise ConfigError(f"{where} has no rows")
        return rows

    def _json_rows(self, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                self.refuse(number, f"no JSON: {error}")
            if not isinstance(row, dict):
                self.refuse(number, f"{line[:60]!r} is no object")
            yield number, row


def _csv_rows(lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(lines)
    names = [name for name in reader.fieldnames or () if name]
    if twice := {name for name in names if names.count(name) > 1}:
        raise csv.Error(f"columns {sorted(twice)} are there twice")
    for row in reader:
        yield reader.line_num, row
