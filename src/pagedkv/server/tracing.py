"""OpenTelemetry spans of requests: one each, with the moments at which its phases begin.

Attributes are those of the GenAI semantic conventions (status: development), those of our own begin
with "pagedkv.". No text of prompt or output is in them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import FastAPI
from opentelemetry import context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.propagators.textmap import Getter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue
from starlette.types import ASGIApp, Receive, Scope, Send

from pagedkv.engine.wire import Batch
from pagedkv.scheduling.messages import Add, Delta, Message, RequestUsage
from pagedkv.server.async_engine import AsyncEngine

_SERVICE = "pagedkv"


class Tracing:
    """Spans of an engine's requests go to `endpoint` by OTLP over HTTP, in batches.

    The SDK's own variables hold for all else, such as OTEL_SERVICE_NAME and OTEL_TRACES_SAMPLER.
    """

    def __init__(self, endpoint: str) -> None:
        named = "OTEL_SERVICE_NAME" in os.environ
        resource = Resource.create({} if named else {SERVICE_NAME: _SERVICE})
        self.provider = TracerProvider(resource=resource)
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracers: list[RequestTracer] = []

    def follow(self, app: FastAPI, engine: AsyncEngine, model: str) -> None:
        """From now on the requests of this application; it has not answered any yet."""
        tracer = RequestTracer(self.provider, model, engine.clock)
        engine.senders.append(tracer.sent)
        engine.watchers.append(tracer.take)
        app.add_middleware(TraceContext)
        self._tracers.append(tracer)

    def close(self) -> None:
        """Ends all spans and sends what is left; this may take seconds."""
        for tracer in self._tracers:
            tracer.close()
        self.provider.shutdown()


class TraceContext:
    """ASGI: what a request starts belongs to the span that its `traceparent` header names."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        token = context.attach(extract(scope["headers"], getter=_Headers()))
        try:
            await self._app(scope, receive, send)
        finally:
            context.detach(token)


class _Headers(Getter[list[tuple[bytes, bytes]]]):
    """Headers as ASGI has them."""

    def get(self, carrier: list[tuple[bytes, bytes]], key: str) -> list[str] | None:
        wanted = key.lower().encode()
        return [value.decode("latin-1") for name, value in carrier if name == wanted] or None

    def keys(self, carrier: list[tuple[bytes, bytes]]) -> list[str]:
        return [name.decode("latin-1") for name, _ in carrier]


@dataclass(slots=True)
class _Live:
    """The span of a request in the core."""

    span: Span
    samples: int
    admitted: bool = False
    tokens: int = 0
    reasons: dict[int, str] = field(default_factory=dict)  # by sample


class RequestTracer:
    """Told of what goes to the core and of what comes from it.

    clock: that of the requests' arrivals. A request whose id begins as those of chat completions do
    is a chat, any other a completion.
    """

    def __init__(self, provider: TracerProvider, model: str, clock: Callable[[], float]) -> None:
        self._tracer = provider.get_tracer("pagedkv")
        self._model, self._clock = model, clock
        self._epoch = time.time_ns() - round(clock() * 1e9)
        self._live: dict[str, _Live] = {}

    def sent(self, message: Message) -> None:
        """A message goes to the core: in the context of the request that it is for."""
        if not isinstance(message, Add):
            return
        operation = "chat" if message.request_id.startswith("chatcmpl-") else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            kind=SpanKind.SERVER,
            attributes=_asked(message, operation, self._model),
            start_time=self._time(message.arrival),
        )
        span.add_event("queue", timestamp=self._time(message.arrival))
        self._live[message.request_id] = _Live(span, message.params.n)

    def take(self, batch: Batch) -> None:
        """What has come from the core."""
        now = self._clock()
        for delta in batch.deltas:
            live = self._live.get(delta.request_id)
            if live is not None:
                self._take(live, delta, now)

    def close(self) -> None:
        """Ends the spans of requests of which nothing more will come."""
        for live in self._live.values():
            _fail(live.span, "engine", "the engine has ended")
            live.span.end()
        self._live.clear()

    def _take(self, live: _Live, delta: Delta, now: float) -> None:
        span = live.span
        if delta.admitted_at is not None and not live.admitted:
            live.admitted = True
            span.add_event("prefill", timestamp=self._time(delta.admitted_at))
        if delta.token_ids:
            if not live.tokens:
                span.add_event("decode", timestamp=self._time(now))
            live.tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            live.reasons[delta.sample] = delta.finish_reason
        if delta.error_type is not None:
            _fail(span, delta.error_type, delta.error)
        if delta.usage is None and len(live.reasons) < live.samples:
            return
        del self._live[delta.request_id]
        span.set_attribute("gen_ai.usage.output_tokens", live.tokens)
        span.set_attribute(
            "gen_ai.response.finish_reasons", [live.reasons[i] for i in sorted(live.reasons)]
        )
        if delta.usage is not None:
            span.set_attributes(_taken(delta.usage))
        span.end(self._time(now))

    def _time(self, seconds: float) -> int:
        """Nanoseconds since 1970."""
        return self._epoch + round(seconds * 1e9)


def _asked(add: Add, operation: str, model: str) -> dict[str, AttributeValue]:
    params = add.params
    wanted: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": _SERVICE,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": add.request_id.partition("#")[0],
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.seed": params.seed,
        "gen_ai.usage.input_tokens": len(add.prompt),
        "pagedkv.tenant": add.tenant,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def _taken(usage: RequestUsage) -> dict[str, AttributeValue]:
    return {f"pagedkv.{name}": value for name, value in usage._asdict().items()}


def _fail(span: Span, kind: str, message: str | None) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, message))
