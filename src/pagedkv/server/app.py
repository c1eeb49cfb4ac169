"""The HTTP application: which routes there are, and what they share."""

from __future__ import annotations

from fastapi import FastAPI

from pagedkv.server import dashboard, health
from pagedkv.server.async_engine import AsyncEngine
from pagedkv.server.authentication import KeyMiddleware
from pagedkv.server.keys import NO_KEYS, KeyRing
from pagedkv.server.metrics import Metrics, ResponseCounter
from pagedkv.server.metrics import router as metrics_router
from pagedkv.server.openai import router as openai
from pagedkv.server.openai.errors import add_error_handlers


def create_app(engine: AsyncEngine, models: tuple[str, ...], keys: KeyRing = NO_KEYS) -> FastAPI:
    """The application over an engine that has been started; `models`: the names it answers to."""
    app = FastAPI(title="pagedkv", docs_url=None, redoc_url=None)
    add_error_handlers(app)
    app.include_router(health.router(engine))
    app.include_router(openai.router(engine, models))
    app.include_router(dashboard.router(engine, models[0]))
    metrics = Metrics(engine, models[0])
    app.include_router(metrics_router(metrics))
    app.add_middleware(KeyMiddleware, ring=keys)
    app.add_middleware(ResponseCounter, count=metrics.count_response)
    return app
