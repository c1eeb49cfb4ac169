"""Where prompts come from on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pagedkv.errors import RequestError

_BYTE_ORDER_MARK = "\ufeff"


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
