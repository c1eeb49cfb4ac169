"""`--report`, `--plot`: where an HTML page is written."""

from __future__ import annotations

import os
from pathlib import Path

from pagedkv.errors import ConfigError
from pagedkv.simulation.charts import require_matplotlib


def check_report(path: Path, option: str = "--report") -> None:
    """Before a long run: ConfigError or MissingExtraError if there will be no report of it."""
    require_matplotlib()
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        why = "it is a folder" if path.is_dir() else f"{folder} is no folder that can be written to"
        raise ConfigError(f"{option}={str(path)!r} cannot be written: {why}")


def write_report(path: Path, page: str, option: str = "--report") -> None:
    """ConfigError if the file cannot be written after all."""
    try:
        path.write_text(page, encoding="utf-8")
    except (OSError, UnicodeError, ValueError) as error:
        raise ConfigError(f"{option}={str(path)!r} cannot be written: {error}") from error
