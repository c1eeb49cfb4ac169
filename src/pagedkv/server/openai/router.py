"""The routes of OpenAI's API, and those beside it that its users know."""

from __future__ import annotations

from fastapi import APIRouter

from pagedkv.server.async_engine import AsyncEngine
from pagedkv.server.openai import chat, completions, models, tokens
from pagedkv.server.openai.api import Api


def router(engine: AsyncEngine, names: tuple[str, ...]) -> APIRouter:
    """names: of the model, the first one by default."""
    api, routes = Api(engine, names), APIRouter()
    for part in (models, completions, chat, tokens):
        routes.include_router(part.router(api))
    return routes
