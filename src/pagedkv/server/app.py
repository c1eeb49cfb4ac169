"""The HTTP application: which routes there are, and what they share."""

from __future__ import annotations

from fastapi import Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware

from pagedkv.server import dashboard, health, workers
from pagedkv.server.async_engine import AsyncEngine
from pagedkv.server.authentication import KeyMiddleware, operator_only
from pagedkv.server.exchange import ExchangeMiddleware
from pagedkv.server.keys import KeyRing
from pagedkv.server.metrics import Metrics, ResponseCounter
from pagedkv.server.metrics import router as metrics_router
from pagedkv.server.openai import router as openai
from pagedkv.server.openai.errors import add_error_handlers
from pagedkv.server.settings import ServeSettings


def create_app(engine: AsyncEngine, settings: ServeSettings) -> FastAPI:
    """The application over an engine that has been started."""
    given, models = settings.server, settings.model_names()
    app = FastAPI(title="pagedkv", docs_url=None, redoc_url=None)
    add_error_handlers(app)
    app.include_router(health.router(engine, given.watchdog_after))
    app.include_router(openai.router(engine, settings))
    if settings.cluster.roles():
        app.include_router(workers.router(engine))
    if given.dashboard:
        app.include_router(dashboard.router(engine, models[0]))
    # The last one added is the outermost: nothing is read for those who may not come in.
    app.add_middleware(
        ExchangeMiddleware,
        max_body=given.max_body_bytes,
        max_head=given.max_header_bytes,
        read_timeout=given.reader_timeout,
        lifetime=engine.lifetime,
    )
    app.add_middleware(KeyMiddleware, ring=KeyRing.of(settings))
    if given.metrics:
        metrics = Metrics(engine, models[0], given.max_tenant_labels)
        app.include_router(metrics_router(metrics), dependencies=[Depends(operator_only)])
        app.add_middleware(ResponseCounter, count=metrics.count_response)
    if given.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=given.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app
