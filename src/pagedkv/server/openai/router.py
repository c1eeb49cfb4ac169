"""The routes of OpenAI's API, and those beside it that its users know."""

from __future__ import annotations

from fastapi import APIRouter

from pagedkv.server.async_engine import AsyncEngine
from pagedkv.server.openai import chat, completions, models, tokens
from pagedkv.server.openai.api import Api
from pagedkv.server.openai.limits import Limits


def router(engine: AsyncEngine, names: tuple[str, ...], limits: Limits | None = None) -> APIRouter:
    """names: of the model, the first one by default. limits: None for none of the operator's."""
    api, routes = Api(engine, names, limits or Limits()), APIRouter()
    for part in (models, completions, chat, tokens):
        routes.include_router(part.router(api))
    return routes
