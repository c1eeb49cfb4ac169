"""`GET /metrics`, and what stands behind it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import choose_encoder

from pagedkv.server.async_engine import AsyncEngine
from pagedkv.server.metrics.requests import RequestMeter
from pagedkv.server.metrics.status import StatusCollector


class Metrics:
    """The metrics of one application: its own registry, fed by what passes the engine's front.

    model: the name under which the model is served. max_tenants: see `StatusCollector`.
    """

    def __init__(self, engine: AsyncEngine, model: str, max_tenants: int) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(StatusCollector(engine.figures, max_tenants))
        meter = RequestMeter(self.registry, engine.clock)
        self._responses = Counter(
            "pagedkv:http_responses", "HTTP answers by status.", ("status",), registry=self.registry
        )
        info = Gauge(
            "pagedkv:model_info",
            "1; the model that is served.",
            ("model_name",),
            registry=self.registry,
        )
        info.labels(model).set(1)
        engine.senders.append(meter.sent)
        engine.watchers.append(meter.take)

    def count_response(self, status: int) -> None:
        """An HTTP answer has begun."""
        self._responses.labels(str(status)).inc()


def router(metrics: Metrics) -> APIRouter:
    """`/metrics`, in the text format or OpenMetrics, as the scraper asks."""
    routes = APIRouter()

    @routes.get("/metrics", include_in_schema=False)
    async def scrape(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics.registry), media_type=content_type)

    return routes
