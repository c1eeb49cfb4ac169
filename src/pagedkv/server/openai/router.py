"""The routes of OpenAI's API, and those beside it that its users know."""

from __future__ import annotations

from fastapi import APIRouter

from pagedkv.server.async_engine import AsyncEngine
from pagedkv.server.openai import chat, completions, models, responses, tokens
from pagedkv.server.openai.api import Api
from pagedkv.server.settings import ServeSettings


def router(engine: AsyncEngine, settings: ServeSettings) -> APIRouter:
    api, routes = Api(engine, settings), APIRouter()
    for part in (models, completions, chat, responses, tokens):
        routes.include_router(part.router(api))
    return routes
