"""GET /v1/models, /v1/models/{name} and /version."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Response

from pagedkv.server.openai.api import Api, json_response


def router(api: Api) -> APIRouter:
    routes, started = APIRouter(), int(time.time())
    facts = api.engine.facts
    longest = min(facts.config.max_model_len, facts.sequence_blocks * facts.block_size)

    def described(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "pagedkv",
            "root": api.models[0],
            "max_model_len": longest,
        }

    @routes.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [described(name) for name in api.models]})

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_response(described(api.model(name)))

    @routes.get("/version")
    async def show_version() -> Response:
        return json_response({"version": version("pagedkv")})

    return routes
