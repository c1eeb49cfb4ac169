"""What form an output must have: `StructuredOutputs`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pagedkv.errors import RequestError

MAX_GRAMMAR_BYTES = 32_768
MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form of a request's output, in exactly one of these ways. Names as vLLM users know them.

    json: a JSON schema, as text or as a dict, which is kept as its text. json_object: any JSON
    object. regex: the whole output matches it (no look-around). choice: one of these texts.
    grammar: a context-free grammar in the Lark dialect of llguidance, whose first rule is `start`.

    At most MAX_GRAMMAR_BYTES bytes of it in UTF-8, and MAX_CHOICES choices. Whether a grammar
    library can use it is found out where the request is read. Raises RequestError naming the field.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise RequestError(f"json_object={self.json_object!r:.200} must be True or False")
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(field.name for field in fields(self))
            raise RequestError(
                f"structured_outputs gives {' and '.join(given) or 'nothing'}: give exactly one of "
                f"{names}"
            )
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("json", "regex", "grammar"):
            text = getattr(self, name)
            if text is not None:
                _check_text(name, text)

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(f.name for f in fields(self) if getattr(self, f.name) not in (None, False))


def _schema_text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(schema))
    except RecursionError:
        raise RequestError("the JSON schema is nested too deeply, or contains itself") from None
    except (TypeError, ValueError) as error:
        raise RequestError(f"json={schema!r:.200} is no JSON schema: {error}") from None


def _choices(choice: object) -> tuple[str, ...]:
    if isinstance(choice, (str, bytes, bytearray)) or not isinstance(choice, Sequence):
        raise RequestError(f"choice={choice!r:.200} must be a list of texts")
    if not 1 <= len(choice) <= MAX_CHOICES:
        raise RequestError(f"choice holds {len(choice)} texts: give 1 to {MAX_CHOICES}")
    for text in choice:
        _check_text("choice", text)
    total = sum(len(text.encode()) for text in choice)
    if total > MAX_GRAMMAR_BYTES:
        raise RequestError(f"choice has {total} bytes: give at most {MAX_GRAMMAR_BYTES}")
    return tuple(choice)


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise RequestError(f"{name}={text!r:.200} must be text, and not empty")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode: {error}") from None
    if size > MAX_GRAMMAR_BYTES:
        raise RequestError(f"{name} has {size} bytes: give at most {MAX_GRAMMAR_BYTES}")
