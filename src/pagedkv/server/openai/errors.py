"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from pagedkv.errors import EngineDeadError, OverloadError, RequestError, ShutdownError
from pagedkv.server.error_body import error_body

_LOG = logging.getLogger("pagedkv.server")

# Errors of the engine begin with the field that is wrong, "top_p=2.0 is not valid", or that of a
# message, "content=5 must be text", or tell of the prompt and its tokens.
_FIELD = re.compile(r"(?:prompt \d+: )?(\w+)(?:=| has token id )|(?:the )?prompt\b|token id ")
_FIELDS = {"content": "messages", "message": "messages", "prompt_token_ids": "prompt"}


# What OpenAI calls errors of these statuses.
_TYPES = {400: "invalid_request_error", 429: "rate_limit_error"}


class FieldError(RequestError):
    """`param`: the field of the body that is wrong."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModelError(RequestError):
    """A model that this server does not have."""


class FailedAnswer(Exception):
    """A request ended without an answer. `status`: of HTTP; `kind`: what went wrong, a word."""

    def __init__(self, message: str, status: int, kind: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


def request_error(error: RequestError) -> tuple[int, Any]:
    """Status and body for what a client has asked for and cannot have."""
    if isinstance(error, OverloadError):
        return 429, error_body(str(error), "rate_limit_error")
    if isinstance(error, UnknownModelError):
        return 404, error_body(str(error), "invalid_request_error", "model", "model_not_found")
    param = error.param if isinstance(error, FieldError) else _field(str(error))
    return 400, error_body(str(error), "invalid_request_error", param)


def _field(message: str) -> str | None:
    named = _FIELD.match(message)
    if named is None:
        return None
    name = named[1] or "prompt"
    return _FIELDS.get(name, name)


def server_error(error: Exception) -> tuple[int, Any]:
    """Status and body for what is not the client's fault; what nobody expects is logged."""
    if isinstance(error, FailedAnswer):
        name = _TYPES.get(error.status, "server_error")
        return error.status, error_body(str(error), name, code=error.kind)
    if isinstance(error, EngineDeadError):
        return 500, error_body(str(error), "server_error", code="engine_dead")
    if isinstance(error, ShutdownError):
        return 503, error_body(str(error), "server_error", code="shutting_down")
    _LOG.error("a request has failed", exc_info=error)
    return 500, error_body("an error of the server, see its log", "server_error")


def later(error: Exception) -> dict[str, str] | None:
    """The header that says when to try again, in whole seconds, where that makes sense."""
    if isinstance(error, OverloadError):
        return {"retry-after": str(math.ceil(error.retry_after))}
    if isinstance(error, FailedAnswer):
        return {"retry-after": "1"} if error.status in (429, 503) else None
    return {"retry-after": "1"} if isinstance(error, ShutdownError) else None


def add_error_handlers(app: FastAPI) -> None:
    """Makes every error of a handler an answer of this form."""

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        body = error_body(f"{where}: {first['msg']}", "invalid_request_error", where or None)
        return JSONResponse(body, 400)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        body = error_body(str(error.detail), "invalid_request_error")
        return JSONResponse(body, error.status_code, headers=error.headers)

    @app.exception_handler(RequestError)
    async def request(_: Request, error: RequestError) -> JSONResponse:
        status, body = request_error(error)
        return JSONResponse(body, status, headers=later(error))

    @app.exception_handler(Exception)
    @app.exception_handler(EngineDeadError)
    @app.exception_handler(ShutdownError)
    @app.exception_handler(FailedAnswer)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        status, body = server_error(error)
        return JSONResponse(body, status, headers=later(error))
