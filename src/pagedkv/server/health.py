"""Whether the server lives, and whether it should be given requests."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from pagedkv.server.async_engine import AsyncEngine


def router(engine: AsyncEngine) -> APIRouter:
    """`/health`: the process answers and its core lives. `/ready`: it takes requests."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> JSONResponse:
        if engine.dead is not None:
            return JSONResponse({"status": "dead", "reason": str(engine.dead)}, 503)
        return JSONResponse({"status": "ok"})

    @routes.get("/ready")
    async def ready() -> JSONResponse:
        if engine.dead is not None:
            return JSONResponse({"status": "dead", "reason": str(engine.dead)}, 503)
        if engine.draining:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ready"})

    return routes
