"""Whether the server lives, and whether it should be given requests."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from pagedkv.server.async_engine import AsyncEngine


def router(engine: AsyncEngine, slow_step: float) -> APIRouter:
    """`/health`: the process answers and its core lives. `/ready`: it takes requests.

    slow_step: seconds after which a core that has work and brings nothing is not ready.
    """
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
        cluster = None if engine.status is None else engine.status.cluster
        if cluster is not None and cluster.missing is not None:
            return JSONResponse({"status": "waiting", "reason": cluster.missing}, 503)
        silent = engine.silent_for()
        if silent > slow_step:
            reason = f"a step has been running for {silent:.1f} seconds"
            return JSONResponse({"status": "slow", "reason": reason}, 503)
        return JSONResponse({"status": "ready"})

    return routes
