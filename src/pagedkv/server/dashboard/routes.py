"""The page at `/dashboard`, its files, its data, and why a request waited.

It shows requests of all tenants, so it is for the operator: where keys are set it takes one of
`api_key`. A browser asks its user for it (HTTP Basic, the password is the key) and sends it in a
header; no cookie, no script and no address ever has it.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import secrets
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from pagedkv.engine.status import WorkerLoad
from pagedkv.server.async_engine import AsyncEngine
from pagedkv.server.authentication import operator_only
from pagedkv.server.dashboard.history import History
from pagedkv.server.dashboard.pictures import ARRAYS, NoPicture, Picture, Pictures
from pagedkv.server.error_body import error_body

_TYPES = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
    }
)
_HEADERS = MappingProxyType(
    {
        "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
        "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
)
_PAGE = "page.html"
_WORTH_PACKING = 16_384  # bytes


class _File:
    """One of the page's files."""

    def __init__(self, name: str, content: bytes) -> None:
        self._content = content
        tag = hashlib.blake2b(content, digest_size=8).hexdigest()
        self._headers = {**_HEADERS, "ETag": f'"{tag}"'}
        self._type = _TYPES[name[name.rindex(".") :]]

    def answer(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self._headers["ETag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, media_type=self._type, headers=self._headers)


def router(engine: AsyncEngine, model: str) -> APIRouter:
    """Of an engine that has been started. model: the name that the page shows."""
    routes = APIRouter(include_in_schema=False, dependencies=[Depends(operator_only)])
    shipped = {
        file.name: _File(file.name, file.read_bytes())
        for file in files(__package__).joinpath("static").iterdir()
    }
    history = History(engine.facts, engine.clock)
    engine.senders.append(history.sent)
    engine.watchers.append(history.take)
    pictures = Pictures(engine)
    run = secrets.token_hex(8)  # another one after a restart: what a page has kept is void then

    @routes.get("/dashboard")
    async def page(request: Request) -> Response:
        return shipped[_PAGE].answer(request)

    @routes.get("/dashboard/static/{name}")
    async def static(name: str, request: Request) -> Response:
        if name not in shipped:
            raise HTTPException(404, f"the dashboard has no file {name!r:.100}")
        return shipped[name].answer(request)

    @routes.get("/dashboard/data")
    async def data(request: Request) -> Response:
        query = request.query_params
        try:
            picture = await pictures.newest()
        except NoPicture as error:
            return JSONResponse(error_body(str(error), "server_error"), 503)
        values = {
            "run": run,
            "now": engine.clock(),
            "taken": picture.taken,
            "server": {"model": model, "draining": engine.draining},
            "picture": _trimmed(picture, query.get("pool", "")),
            "history": history.columns(
                _number(query.get("since")) if query.get("run") == run else -1
            ),
            "recent": history.recent(),
            "hits": history.hits(),
            "tenants": history.tenants(picture.values["tenants"]),
            "workers": _workers(engine),
        }
        packs = "gzip" in request.headers.get("accept-encoding", "")
        return await asyncio.to_thread(_answer, values, packs)

    @routes.get("/dashboard/explain/{request_id}")
    async def explain(request_id: str) -> Response:
        try:
            words: str = await engine.ask("explain", request_id)
        except LookupError as error:
            raise HTTPException(404, str(error)) from None
        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        return PlainTextResponse(words, headers=headers)

    return routes


def _workers(engine: AsyncEngine) -> tuple[WorkerLoad, ...]:
    """None where there is one engine alone."""
    cluster = None if engine.status is None else engine.status.cluster
    return () if cluster is None else cluster.workers


def _number(text: str | None) -> int:
    try:
        return int(text or -1)
    except ValueError:
        return -1


def _trimmed(picture: Picture, known: str) -> dict[str, Any]:
    """Without the arrays of the pool if the viewer has the same; bytes become base64."""
    pool = dict(picture.values["pool"], tag=picture.tag)
    if picture.tag == known:
        for name in ARRAYS:
            del pool[name]
    return {**picture.values, "pool": pool}


def _answer(values: dict[str, Any], packs: bool) -> Response:
    body = msgspec.json.encode(values)
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    if packs and len(body) > _WORTH_PACKING:
        body = gzip.compress(body, 1)
        headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return Response(body, media_type="application/json", headers=headers)
