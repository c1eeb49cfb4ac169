"""Spans of requests, read back from an exporter in memory."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Callable, Coroutine
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from serving import MODEL, GatedExecutor, running, settings, toy_core
from tiny_llm import VOCAB

from pagedkv.engine.core import EngineCore
from pagedkv.engine.toy import ToyExecutor
from pagedkv.scheduling.params import SamplingParams
from pagedkv.server.app import create_app
from pagedkv.server.async_engine import AsyncEngine, Stream
from pagedkv.server.tracing import RequestTracer, TraceContext, Tracing

Spans = Callable[[], tuple[ReadableSpan, ...]]


def traced(
    test: Callable[[AsyncEngine, Spans], Coroutine[Any, Any, None]],
    core: Callable[[], EngineCore] = toy_core,
) -> tuple[ReadableSpan, ...]:
    """Runs the test on a traced engine; the spans that it has left."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def main() -> None:
        async with running(core) as engine:
            tracer = RequestTracer(provider, MODEL, engine.clock)
            engine.senders.append(tracer.sent)
            engine.watchers.append(tracer.take)
            await test(engine, exporter.get_finished_spans)
        tracer.close()

    asyncio.run(main())
    return exporter.get_finished_spans()


def submit(engine: AsyncEngine, name: str, prompt: str = "abc", **params: Any) -> Stream:
    params.setdefault("temperature", 0.0)
    wanted = SamplingParams(**params)
    prepared = engine.front.reader.read(name, prompt, wanted, arrival=engine.clock(), tenant="t")
    return engine.submit(prepared)


async def until_end(stream: Stream) -> None:
    async for _ in stream:
        pass


def test_a_request_is_one_span_with_its_phases_in_order() -> None:
    async def test(engine: AsyncEngine, spans: Spans) -> None:
        await until_end(submit(engine, "chatcmpl-1", max_tokens=3, ignore_eos=True))

    (span,) = traced(test)
    assert span.name == f"chat {MODEL}" and span.kind is SpanKind.SERVER
    assert [event.name for event in span.events] == ["queue", "prefill", "decode"]
    times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    assert times == sorted(times) and span.start_time == span.events[0].timestamp
    seen = dict(span.attributes)
    assert seen["gen_ai.operation.name"] == "chat" and seen["gen_ai.provider.name"] == "pagedkv"
    assert seen["gen_ai.request.model"] == seen["gen_ai.response.model"] == MODEL
    assert seen["gen_ai.response.id"] == "chatcmpl-1" and seen["gen_ai.request.max_tokens"] == 3
    assert seen["gen_ai.usage.input_tokens"] == seen["gen_ai.usage.output_tokens"] == 3
    assert seen["gen_ai.response.finish_reasons"] == ("length",)
    assert seen["pagedkv.tenant"] == "t" and seen["pagedkv.blocks_peak"] == 2
    assert span.status.status_code is StatusCode.UNSET
    assert not [value for value in seen.values() if value == "abc"]


def test_samples_are_one_span() -> None:
    async def test(engine: AsyncEngine, spans: Spans) -> None:
        stream = submit(engine, "cmpl-1", n=3, max_tokens=2, ignore_eos=True, temperature=1.0)
        await until_end(stream)

    (span,) = traced(test)
    seen = dict(span.attributes)
    assert span.name == f"text_completion {MODEL}"
    assert seen["gen_ai.usage.output_tokens"] == 6 and seen["gen_ai.request.choice.count"] == 3
    assert seen["gen_ai.response.finish_reasons"] == ("length",) * 3


def test_a_failed_step_is_an_error_of_its_span_and_a_cancelled_request_is_none() -> None:
    class Broken(ToyExecutor):
        def submit(self, step):
            if step.index == 1:
                raise RuntimeError("boom")
            return super().submit(step)

    executor = GatedExecutor(Broken(64, 4, vocab_size=VOCAB))

    async def test(engine: AsyncEngine, spans: Spans) -> None:
        await_step = asyncio.to_thread(executor.reached.acquire)
        failed = submit(engine, "failed", max_tokens=9, ignore_eos=True)
        await await_step
        executor.allow(None)
        await until_end(failed)
        gone = submit(engine, "gone", max_tokens=50, ignore_eos=True)
        await gone.__anext__()
        engine.cancel(gone)
        async with asyncio.timeout(60):
            while len(spans()) < 2:
                await asyncio.sleep(0.001)

    first, second = traced(test, lambda: toy_core(executor=executor))
    assert first.status.status_code is StatusCode.ERROR and "boom" in first.status.description
    assert first.attributes["error.type"] == "engine"
    assert second.status.status_code is StatusCode.UNSET
    assert second.attributes["gen_ai.response.finish_reasons"] == ("abort",)


def test_spans_of_requests_that_never_end_are_ended_with_the_engine() -> None:
    executor = GatedExecutor(ToyExecutor(64, 4, vocab_size=VOCAB))

    async def test(engine: AsyncEngine, spans: Spans) -> None:
        stream = submit(engine, "stuck", max_tokens=5)
        engine.watchers.clear()  # nothing is heard of it any more
        executor.allow(None)
        await until_end(stream)
        assert not spans()

    (span,) = traced(test, lambda: toy_core(executor=executor))
    assert span.attributes["error.type"] == "engine"


def test_a_span_belongs_to_the_one_that_the_client_names() -> None:
    async def test(engine: AsyncEngine, spans: Spans) -> None:
        app = FastAPI()
        app.add_middleware(TraceContext)

        @app.get("/run")
        async def run() -> None:
            await until_end(submit(engine, engine.new_id("cmpl"), max_tokens=2))

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            parent = f"00-{'a' * 32}-{'b' * 16}-01"
            for headers in ({"traceparent": parent}, {"traceparent": "nonsense"}, {}):
                assert (await client.get("/run", headers=headers)).status_code == 200

    named, nonsense, none = traced(test)
    assert named.context.trace_id == int("a" * 32, 16) and named.parent.span_id == int("b" * 16, 16)
    assert nonsense.parent is None and none.parent is None
    assert len({span.context.trace_id for span in (named, nonsense, none)}) == 3


def test_a_span_has_the_id_of_its_answer() -> None:
    ids = []

    async def test(engine: AsyncEngine, spans: Spans) -> None:
        transport = httpx.ASGITransport(create_app(engine, settings()))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            for prompt in ("abc", ["abc", "abd"]):
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "request_id": "mine"}
                ids.append((await client.post("/v1/completions", json=body)).json()["id"])

    found = [span.attributes["gen_ai.response.id"] for span in traced(test)]
    assert found == ["cmpl-mine"] * 3 and ids == ["cmpl-mine"] * 2


def test_the_operator_may_name_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, expected in ((None, "pagedkv"), ("mine", "mine")):
        if name is not None:
            monkeypatch.setenv("OTEL_SERVICE_NAME", name)
        tracing = Tracing("http://127.0.0.1:9/v1/traces")
        assert tracing.provider.resource.attributes["service.name"] == expected
        tracing.close()


def test_spans_reach_a_collector() -> None:
    """By OTLP over HTTP, at the latest when the server ends."""
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    async def main(tracing: Tracing) -> None:
        async with running() as engine:
            app = create_app(engine, settings())
            tracing.follow(app, engine, MODEL)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                body = {"model": MODEL, "prompt": "abc", "max_tokens": 2}
                headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
                answer = await client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            tracing = Tracing(f"http://127.0.0.1:{collector.server_port}/v1/traces")
            asyncio.run(main(tracing))
            tracing.close()
        finally:
            collector.shutdown()
            thread.join()
    body = gzip.decompress(received[0]) if received[0][:2] == b"\x1f\x8b" else received[0]
    assert b"gen_ai.operation.name" in body and b"text_completion" in body
    assert bytes.fromhex("a" * 32) in body and bytes.fromhex("b" * 16) in body
