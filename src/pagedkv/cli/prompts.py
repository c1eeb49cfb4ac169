"""Where prompts and sizes come from on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from pagedkv.errors import ConfigError, RequestError

_UNITS = ("", "k", "m", "g", "t")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def read_prompts(given: Sequence[str], file: Path | None, stdin: TextIO | None) -> list[str]:
    """Prompts from the arguments, else from the lines of a file, else all of stdin as one.

    Empty lines of a file are skipped. RequestError says what is wrong.
    """
    if given and file is not None:
        raise RequestError(f"prompts are given both as arguments and in --file {file}: use one")
    if given:
        if "" in given:
            raise RequestError(
                f"prompt {list(given).index('')} is empty: give at least one character"
            )
        return list(given)
    if file is not None:
        prompts = [line for line in _read(file).split("\n") if line.strip()]
        if not prompts:
            raise RequestError(f"{file} holds no prompt: write one a line")
        return prompts
    if stdin is None or stdin.isatty():  # None: it was closed before we started
        raise RequestError("no prompt: give one as an argument, on stdin, or a file with --file")
    try:
        text = stdin.read().strip()
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not UTF-8 text: {error}") from error
    if not text:
        raise RequestError("the prompt on stdin is empty: give at least one character")
    return [text]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} is not UTF-8 text: {error}") from error


def parse_bytes(text: str | None) -> int | None:
    """Bytes from "536870912", "512MiB" (powers of 1024) or "2GB" (powers of 1000)."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ConfigError(f"--kv-memory={text!r} is not a size: give bytes, 512MiB or 2GB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _UNITS.index(match[2].lower()))
