"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from pagedkv.errors import EngineDeadError, OverloadError, RequestError


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> Any:
    """The body of an answer that is an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


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
        if isinstance(error, OverloadError):
            return JSONResponse(error_body(str(error), "rate_limit_error"), 429)
        return JSONResponse(error_body(str(error), "invalid_request_error"), 400)

    @app.exception_handler(EngineDeadError)
    async def dead(_: Request, error: EngineDeadError) -> JSONResponse:
        return JSONResponse(error_body(str(error), "server_error"), 500)
