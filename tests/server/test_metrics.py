"""GET /metrics: what a scraper reads, beside what is known to have happened."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Coroutine
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from serving import MODEL, GatedExecutor, running, settings, toy_core
from tiny_llm import VOCAB, byte_tokenizer

from pagedkv.engine.core import EngineCore
from pagedkv.engine.output import RequestOutput
from pagedkv.engine.toy import ToyExecutor
from pagedkv.errors import OverloadError, RequestError
from pagedkv.scheduling.params import SamplingParams
from pagedkv.server.app import create_app
from pagedkv.server.async_engine import AsyncEngine, Stream
from pagedkv.server.core_link import ThreadLink
from pagedkv.server.metrics import Metrics, router

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
DASHBOARD = files("pagedkv.server.metrics") / "grafana.json"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Scraped:
    """An answer of /metrics, by name and labels."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self.samples: Samples = {}
        for family in self.families:
            for sample in family.samples:
                self.samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[f"pagedkv:{name}", tuple(sorted(labels.items()))]

    def series(self, name: str) -> dict[tuple[tuple[str, str], ...], float]:
        return {labels: v for (n, labels), v in self.samples.items() if n == f"pagedkv:{name}"}


class Served:
    """An engine, its application, and a client of it."""

    def __init__(self, engine: AsyncEngine, client: httpx.AsyncClient) -> None:
        self.engine, self.client = engine, client

    def submit(self, prompt: str, tenant: str | None = None, **params: Any) -> Stream:
        slos = {k: params.pop(k) for k in ("ttft_slo", "tpot_slo", "deadline") if k in params}
        params.setdefault("temperature", 0.0)
        prepared = self.engine.front.reader.read(
            self.engine.new_id("test"),
            prompt,
            SamplingParams(**params),
            arrival=self.engine.clock(),
            tenant=tenant,
            **slos,
        )
        return self.engine.submit(prepared)

    async def run(self, prompt: str, **params: Any) -> RequestOutput:
        async for output in self.submit(prompt, **params):
            newest = output
        return newest

    async def scrape(self, accept: str = "") -> Scraped:
        answer = await self.client.get("/metrics", headers={"accept": accept})
        assert answer.status_code == 200
        return Scraped(answer.text)


def serve(
    test: Callable[[Served], Coroutine[Any, Any, None]],
    core: Callable[[], EngineCore] = toy_core,
    app: Callable[[AsyncEngine], FastAPI] = lambda engine: create_app(engine, settings()),
) -> None:
    async def main() -> None:
        async with running(core) as engine:
            transport = httpx.ASGITransport(app(engine), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                await test(Served(engine, client))

    asyncio.run(main())


def gated() -> GatedExecutor:
    return GatedExecutor(ToyExecutor(64, 4, vocab_size=VOCAB))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.001)


def test_a_new_server_has_all_its_series_at_zero() -> None:
    async def test(served: Served) -> None:
        await until(lambda: served.engine.status is not None)
        seen = await served.scrape()
        assert seen("num_requests_running") == seen("num_requests_waiting") == 0
        assert seen("kv_blocks", state="free") == 64 and seen("kv_cache_usage") == 0
        assert seen("num_preemptions_total", kind="swap", reason="growth") == 0
        assert seen("request_success_total", finished_reason="abort") == 0
        assert seen("model_info", model_name=MODEL) == 1

    serve(test)


def test_requests_are_counted_and_timed() -> None:
    async def test(served: Served) -> None:
        await served.run("abcdefgh", max_tokens=6)
        await served.run("abcdefgh", max_tokens=6, n=2)
        seen = await served.scrape()
        assert seen("request_success_total", finished_reason="length") == 2
        assert seen("generation_tokens_total") == 18 and seen("prompt_tokens_total") == 16
        for name, count in (
            ("time_to_first_token_seconds", 2),
            ("e2e_request_latency_seconds", 2),
            ("request_queue_time_seconds", 2),
            ("request_prefill_time_seconds", 2),
            ("request_decode_time_seconds", 2),
            ("inter_token_latency_seconds", 15),
            ("request_generation_tokens", 2),
        ):
            assert seen(f"{name}_count") == count, name
        assert seen("request_prompt_tokens_sum") == 16 and seen("request_params_n_sum") == 3
        assert seen("request_generation_tokens_sum") == 18
        steps = seen("engine_steps_total")
        assert seen("iteration_tokens_total_count") == steps
        assert seen("step_time_seconds_count", part="sample") == steps
        assert seen("prefix_cache_queries_total") == 16
        assert 0 < seen("prefix_cache_hits_total", tier="device") <= 7

    serve(test)


def test_times_end_when_the_front_has_the_tokens() -> None:
    """Every time is known, on a clock that moves when it is told to."""

    class Clock:
        now = 100.0

        def __call__(self) -> float:
            return self.now

    async def test(served: Served) -> None:
        clock: Any = served.engine.clock
        stream = served.submit("abc", max_tokens=3, ttft_slo=50.0)
        for wait in (1.0, 0.5, 2.0):
            clock.now += wait
            executor.allow(1)
            await stream.__anext__()
        seen = await served.scrape()
        assert seen("time_to_first_token_seconds_sum") == 1.0
        assert seen("inter_token_latency_seconds_sum") == 2.5
        assert seen("e2e_request_latency_seconds_sum") == 3.5
        assert seen("request_decode_time_seconds_sum") == 2.5

    async def main() -> None:
        engine = AsyncEngine(
            ThreadLink(lambda: toy_core(executor=executor)),
            lambda facts: byte_tokenizer(),
            clock=Clock(),
        )
        await engine.start()
        transport = httpx.ASGITransport(create_app(engine, settings()))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            await test(Served(engine, client))
        await engine.close()

    executor = gated()
    asyncio.run(main())


def test_all_aborted_at_once_leave_nothing_in_the_gauges() -> None:
    """K10: nothing else happens, and the next scrape says so."""
    executor = gated()

    async def test(served: Served) -> None:
        streams = [served.submit(chr(97 + i), max_tokens=40, ignore_eos=True) for i in range(12)]
        executor.allow(3)
        await until(lambda: served.engine.status is not None)
        await until(lambda: served.engine.status.num_running == 8)
        before = await served.scrape()
        assert before("num_requests_running") == 8 and before("num_requests_waiting") == 4
        assert 0 < before("kv_cache_usage") <= 1
        for stream in streams:
            served.engine.cancel(stream)
        executor.allow(None)
        await until(lambda: not served.engine.status.num_running)
        after = await served.scrape()
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage"):
            assert after(name) == 0
        assert after("kv_blocks", state="held") == 0
        assert after("request_success_total", finished_reason="abort") == 12
        assert min(after.samples.values()) >= 0

    serve(test, lambda: toy_core(executor=executor))


def test_an_error_in_a_metric_reaches_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """K10."""

    def broken(news: object) -> None:
        raise ValueError("a figure is wrong")

    async def test(served: Served) -> None:
        served.engine.watchers.insert(0, broken)
        served.engine.senders.insert(0, broken)
        with caplog.at_level(logging.CRITICAL):
            output = await served.run("abc", max_tokens=4)
        assert len(output.outputs[0].token_ids) == 4
        assert (await served.scrape())("time_to_first_token_seconds_count") == 1

    serve(test)


def test_refused_requests_are_counted_apart_and_timed_nowhere() -> None:
    executor = gated()

    async def test(served: Served) -> None:
        streams = [served.submit("first", max_tokens=2)]
        await asyncio.to_thread(executor.reached.acquire)
        streams += [served.submit(f"prompt {i}", max_tokens=2) for i in range(2)]
        for i in range(2, 4):
            with pytest.raises(OverloadError):
                served.submit(f"prompt {i}", max_tokens=2)
        executor.allow(None)
        for stream in streams:
            assert [output async for output in stream][-1].outputs[0].error_type is None
        seen = await served.scrape()
        assert seen("requests_refused_total", reason="overload") == 2
        assert seen("e2e_request_latency_seconds_count") == 3
        with pytest.raises(RequestError):
            served.submit("", max_tokens=2)

    serve(test, lambda: toy_core(executor=executor, max_num_seqs=1, max_num_waiting=3))


def test_tenants_beyond_the_cap_share_series_that_never_fall() -> None:
    def app(engine: AsyncEngine) -> FastAPI:
        application = FastAPI()
        application.include_router(router(Metrics(engine, MODEL, max_tenants=2)))
        return application

    async def test(served: Served) -> None:
        before: dict[Any, float] = {}
        for tenant in ("a", None, "c", "d", "a", "c"):
            await served.run("abc", tenant=tenant, max_tokens=2)
            now = (await served.scrape()).series("tenant_requests_total")
            assert all(now[labels] >= number for labels, number in before.items())
            before = now
        assert before == {
            (("tenant", "a"),): 2,
            (("tenant", "none"),): 1,
            (("tenant", "other"),): 3,
        }
        seen = await served.scrape()
        assert seen("tenant_service_total", tenant="a") == 2 * (3 + 2 * 2)
        assert seen("tenant_requests_running", tenant="other") == 0

    serve(test, app=app)


def test_the_operator_may_turn_metrics_off() -> None:
    async def test(served: Served) -> None:
        await served.run("abc", max_tokens=2)
        assert (await served.client.get("/metrics")).status_code == 404

    serve(test, app=lambda engine: create_app(engine, settings(metrics=False)))


def test_slo_attainment_is_counted_by_tenant() -> None:
    async def test(served: Served) -> None:
        await served.run("abc", tenant="a", max_tokens=3, ttft_slo=1e6, tpot_slo=1e6)
        await served.run("abc", tenant="a", max_tokens=3, ttft_slo=1e-9)
        seen = await served.scrape()
        labels = {"tenant": "a", "slo": "ttft"}
        assert seen("slo_requests_total", outcome="met", **labels) == 1
        assert seen("slo_requests_total", outcome="missed", **labels) == 1
        assert seen("slo_requests_total", tenant="a", slo="tpot", outcome="met") == 1

    serve(test)


def test_answers_are_counted_by_status() -> None:
    def app(engine: AsyncEngine) -> FastAPI:
        application = create_app(engine, settings())

        @application.get("/raises")
        async def raises() -> None:
            raise KeyError("a fault of ours")

        return application

    async def test(served: Served) -> None:
        for path, status in (("/health", 200), ("/nowhere", 404), ("/raises", 500)):
            assert (await served.client.get(path)).status_code == status
        seen = (await served.scrape()).series("http_responses_total")
        assert seen == {(("status", str(status)),): 1 for status in (200, 404, 500)}

    serve(test, app=app)


def test_two_applications_share_no_number() -> None:
    async def test(served: Served) -> None:
        other = create_app(served.engine, settings())
        await served.client.get("/nowhere")
        transport = httpx.ASGITransport(other)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            seen = Scraped((await client.get("/metrics")).text)
        assert seen.series("http_responses_total") == {}

    serve(test)


def test_open_metrics_is_spoken_where_it_is_asked_for() -> None:
    async def test(served: Served) -> None:
        await until(lambda: served.engine.status is not None)
        accept = "application/openmetrics-text; version=1.0.0"
        answer = await served.client.get("/metrics", headers={"accept": accept})
        assert answer.headers["content-type"].startswith("application/openmetrics-text")
        assert answer.text.endswith("# EOF\n")

    serve(test)


# ---- what is written about them


async def everything(served: Served) -> Scraped:
    """A scrape in which every metric has a series."""
    await served.run("abcdefgh", tenant="a", max_tokens=6, ttft_slo=1.0)
    await served.client.get("/health")
    return await served.scrape()


def documented() -> dict[str, tuple[str, str]]:
    """Name -> (type, labels) by the tables of the reference."""
    rows = re.findall(r"^\| `(pagedkv:\w+)` \| (\w+) \| (.*?) \|", REFERENCE.read_text(), re.M)
    return {name: (kind, labels) for name, kind, labels in rows}


def test_the_reference_names_every_metric_with_its_type_and_labels() -> None:
    async def test(served: Served) -> None:
        exported = {}
        for family in (await everything(served)).families:
            name = family.name + ("_total" if family.type == "counter" else "")
            if name.endswith("_created"):
                continue
            labels = {key for sample in family.samples for key in sample.labels} - {"le"}
            exported[name] = family.type, ", ".join(f"`{key}`" for key in sorted(labels))
        assert documented() == exported

    serve(test)


def test_the_dashboard_asks_for_metrics_and_labels_that_exist() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(queries) >= 15

    async def test(served: Served) -> None:
        seen = await everything(served)
        labels: dict[str, set[str]] = {}
        for name, pairs in seen.samples:
            labels.setdefault(name, set()).update(key for key, _ in pairs)
        for query in queries:
            names = re.findall(r"pagedkv:\w+", query)
            assert names, query
            assert labels.keys() >= set(names), query
            grouped = re.findall(r"by \(([\w, ]+)\) \([^)]*?(pagedkv:\w+)", query)
            chosen = re.findall(r"(?=(pagedkv:\w+)\{(\w+)=)", query)
            for name, asked in [(name, group) for group, name in grouped] + chosen:
                assert labels[name] >= set(asked.split(", ")), query

    serve(test)
