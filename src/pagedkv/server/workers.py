"""The workers of a cluster, for its operator: how they are, and taking one out of service."""

from __future__ import annotations

from fastapi import APIRouter, Depends, HTTPException
from fastapi.responses import JSONResponse

from pagedkv.server.async_engine import AsyncEngine
from pagedkv.server.authentication import operator_only


def router(engine: AsyncEngine) -> APIRouter:
    """`/workers`; 404 where the engine is no cluster, or has no such worker."""
    routes = APIRouter(include_in_schema=False, dependencies=[Depends(operator_only)])

    async def asked(kind: str, worker: str = "") -> JSONResponse:
        try:
            return JSONResponse(await engine.ask(kind, worker))
        except LookupError as error:
            raise HTTPException(404 if kind == "workers" else 409, str(error)) from None

    @routes.get("/workers")
    async def workers() -> JSONResponse:
        return await asked("workers")

    @routes.post("/workers/{name}/drain")
    async def drain(name: str) -> JSONResponse:
        return await asked("drain", name)

    @routes.delete("/workers/{name}/drain")
    async def undrain(name: str) -> JSONResponse:
        return await asked("undrain", name)

    return routes
