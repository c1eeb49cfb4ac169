"""The form of every answer that is an error: OpenAI's."""

from __future__ import annotations

from typing import Any


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> Any:
    """The body. kind: OpenAI's word for it; param: the field that is wrong; code: our word."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
