"""Files of one JSON object a line: a header that says what the file is, then entries."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagedkv.errors import ConfigError

DECISIONS = "pagedkv decision log 1"
_LOG = logging.getLogger("pagedkv")


class LineWriter:
    """Writes lines as they come and keeps none.

    A file that cannot be written any more is given up with a warning: it is not worth a request.
    setting: whose value the path is, for ConfigError if it cannot be written from the start.
    """

    def __init__(self, path: str | Path, kind: str, setting: str) -> None:
        self.path = Path(path)
        try:
            self._file = self.path.open("w", buffering=1, encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{setting}={str(path)!r:.200} cannot be written: {error}") from error
        self.write(json.dumps({"format": kind}))

    def write(self, line: str) -> None:
        """One line, without its line feed."""
        if self._file.closed:
            return
        try:
            self._file.write(line + "\n")
        except (OSError, ValueError) as error:
            _LOG.warning("%s cannot be written any more and ends here: %s", self.path, error)
            self.close()

    def close(self) -> None:
        """Nothing is written any more."""
        try:
            self._file.close()
        except OSError as error:
            _LOG.warning("%s may lack its last lines: %s", self.path, error)


def read_lines(path: Path, *kinds: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and content of each line after the header, of a file of one of these kinds.

    A last line that was cut off when its writer was killed is no line. ConfigError names the line.
    """
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if number > 1 and not raw.endswith(b"\n"):
                    return
                values = _read(path, number, raw)
                if number > 1:
                    yield number, values
                elif values.get("format") not in kinds:
                    raise ConfigError(
                        f"{path}, line 1: no {' or '.join(kinds)} (format "
                        f"{values.get('format')!r:.100})"
                    )
            if file.tell() == 0:
                raise ConfigError(f"{path} is empty: no {' or '.join(kinds)}")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _read(path: Path, number: int, raw: bytes) -> dict[str, Any]:
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ConfigError(f"{path}, line {number}: no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}, line {number}: {values!r:.100} is no JSON object")
    return values
