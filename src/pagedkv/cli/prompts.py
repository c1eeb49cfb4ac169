"""Where prompts and sizes come from on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pagedkv.errors import ConfigError, RequestError

_BYTE_ORDER_MARK = "\ufeff"
_UNITS = ("", "k", "m", "g", "t")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt and, for messages, where it stands: "prompt 2", "line 7 of FILE"."""

    text: str
    place: str


def read_prompts(given: Sequence[str], file: Path | None, stdin: TextIO | None) -> list[PromptText]:
    """Prompts from the arguments, else from the lines of a file, else all of stdin as one.

    "-" among the arguments is the text on stdin, and as the file the lines on stdin. Empty lines
    of a file are skipped. RequestError says what is wrong.
    """
    if given and file is not None:
        raise RequestError(f"prompts are given both as arguments and in --file {file}: use one")
    if file is not None:
        name, content = ("stdin", _stdin(stdin)) if file == Path("-") else (file, _read(file))
        lines = enumerate(content.split("\n"), start=1)
        prompts = [PromptText(line, f"line {i} of {name}") for i, line in lines if line.strip()]
        if not prompts:
            raise RequestError(f"{name} holds no prompt: write one a line")
        return prompts
    if not given:
        if stdin is None or stdin.isatty():  # None: it was closed before we started
            raise RequestError("no prompt: give one as an argument, on stdin, or with --file")
        given = ["-"]
    if given.count("-") > 1:
        raise RequestError("stdin is one prompt: give '-' once")
    prompts = [
        PromptText(_stdin(stdin).strip(), "the prompt on stdin")
        if text == "-"
        else PromptText(text, f"prompt {i}")
        for i, text in enumerate(given, start=1)
    ]
    for prompt in prompts:
        if not prompt.text.strip():
            raise RequestError(f"{prompt.place} is empty: give more than white space")
    return prompts


def _stdin(stdin: TextIO | None) -> str:
    if stdin is None:
        raise RequestError("stdin is closed: give the prompt as an argument or with --file")
    try:
        return stdin.read().removeprefix(_BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not UTF-8 text: {error}") from error


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").removeprefix(_BYTE_ORDER_MARK)
    except OSError as error:
        raise RequestError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} is not UTF-8 text: {error}") from error


def parse_bytes(text: str, option: str) -> int:
    """Bytes from "536870912", "512MiB" (powers of 1024) or "2GB" (powers of 1000).

    ConfigError names the option.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ConfigError(f"{option}={text!r} is not a size: give bytes, 512MiB or 2GB")
    base = 1024 if match[3] else 1000
    size = float(match[1]) * base ** _UNITS.index(match[2].lower())
    if size >= 2**63:
        raise ConfigError(f"{option}={text[:80]!r} is more than 2**63 bytes: give less")
    return int(size)
