"""`pagedkv bench serve` against a server whose answers are scripted, and against the real one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from serving import http_server

from pagedkv.cli.load_options import (
    read_goals,
    read_metrics,
    read_percentiles,
    read_slo_classes,
    read_tenants,
)
from pagedkv.cli.main import run
from pagedkv.cli.units import read_count
from pagedkv.errors import ConfigError
from pagedkv.loadtest.requests import Goals, SloClass, Tenant


class Scripted:
    """Answers of `max_tokens` words; what was asked is kept.

    A key "bad" is refused, "nobody's" at once.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str | None, dict[str, Any]]] = []
        self.cut = False

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        async def models(request: Request) -> Any:
            if request.headers.get("authorization") == "Bearer nobody's":
                return JSONResponse({"error": {"message": "no such key"}}, 401)
            return {"data": [{"id": "scripted"}]}

        async def answer(request: Request) -> Response:
            body, key = await request.json(), request.headers.get("authorization")
            self.asked.append((key, body))
            if key == "Bearer bad":
                return JSONResponse({"error": {"message": "no such key"}}, 401)
            return StreamingResponse(self._events(body), media_type="text/event-stream")

        for path in ("/v1/completions", "/v1/chat/completions"):
            app.post(path)(answer)
        return app

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        tokens = body.get("max_tokens") or body["max_completion_tokens"]
        for i in range(tokens):
            reason = "length" if i == tokens - 1 else None
            choice = {"index": 0, "text": " w", "finish_reason": reason}
            if "messages" in body:
                choice = {"index": 0, "delta": {"content": " w"}, "finish_reason": reason}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            if self.cut:
                return
        usage = {"prompt_tokens": 7, "completion_tokens": tokens}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"


@pytest.fixture
def server() -> Iterator[tuple[str, Scripted]]:
    scripted = Scripted()
    with http_server(make_app=lambda engine: scripted.app()) as url:
        yield url, scripted


SMALL = ["--num-prompts", "6", "--input-len", "5", "--output-len", "3"]


def bench(url: str, *args: str) -> int:
    return run(["bench", "serve", "--base-url", url, *SMALL, *args])


def test_the_result_has_all_that_was_asked(
    server: tuple[str, Scripted], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, scripted = server
    tenants = ["--tenant", "a=ka:2", "--tenant", "b=kb:1"]
    classes = ["--slo-class", "fast=60000:60000", "--slo-class", "slow=70000:70000"]
    saved = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--label", "x"]
    args = [*tenants, *classes, *saved, "--ignore-eos", "--extra-body", '{"top_k": 3}']
    assert bench(url, *args, "--metric-percentiles", "50,99", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["completed"], result["failed"]) == (6, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (42, 18)
    assert result["slo_attainment"] == 1.0
    assert result["tenants"]["a"]["completed"] == 4
    assert sum(figures["completed"] for figures in result["slo_classes"].values()) == 6
    assert result["p50_itl_ms"] is not None
    assert result["model_id"] == "scripted"
    assert sorted(key for key, _ in scripted.asked) == ["Bearer ka"] * 4 + ["Bearer kb"] * 2
    body = scripted.asked[0][1]
    assert body["stream_options"] == {"include_usage": True}
    assert (body["ignore_eos"], body["top_k"], body["max_tokens"]) == (True, 3, 3)
    assert body["ttft_slo_ms"] in (60000, 70000)
    assert len(body["prompt"].split()) == 5
    [path] = tmp_path.glob("x-infqps-scripted-*.json")
    kept = json.loads(path.read_text())
    assert {name: kept[name] for name in result} == result
    assert kept["output_lens"] == [3] * 6


def test_chats_and_a_table_for_people(
    server: tuple[str, Scripted], capsys: pytest.CaptureFixture[str]
) -> None:
    url, scripted = server
    args = ["--backend", "openai-chat", "--goodput", "ttft:60000", "tpot:60000"]
    assert bench(url, *args, "--request-rate", "1000", "--burstiness", "0.5") == 0
    body = scripted.asked[0][1]
    assert body["messages"][0]["role"] == "user"
    assert body["max_completion_tokens"] == 3
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("requests completed 6", "good requests 100.0%", "(TTFT)", "generator: requests"):
        assert words in shown


def test_failures_are_told_and_all_failed_is_status_1(
    server: tuple[str, Scripted], capsys: pytest.CaptureFixture[str]
) -> None:
    url, scripted = server
    assert bench(url, "--tenant", "a=ka", "--tenant", "b=bad", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["failures"] == {"HTTP 401: no such key": 3}
    assert bench(url, "--api-key", "bad") == 1
    assert "6 failed: HTTP 401: no such key" in capsys.readouterr().out
    scripted.cut = True
    assert bench(url) == 1
    assert "6 failed: the stream was cut: it has no [DONE]" in capsys.readouterr().out


def test_a_key_that_is_refused_is_told_as_that(
    server: tuple[str, Scripted], capsys: pytest.CaptureFixture[str]
) -> None:
    url, scripted = server
    assert bench(url, "--api-key", "nobody's") == 2
    told = "/v1/models answers 401: no such key; give --api-key or set PAGEDKV_API_KEY"
    assert told in capsys.readouterr().err
    assert not scripted.asked


def test_a_trace_says_when_and_how_much(
    server: tuple[str, Scripted], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, scripted = server
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_ms,prompt_tokens,output_tokens\n7000,4,2\n7001,9,5\n")
    args = ["--dataset-name", "timed_trace", "--dataset-path", str(trace), "--json"]
    assert run(["bench", "serve", "--base-url", url, *args]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["num_prompts"], result["request_rate"]) == (2, "trace")
    asked = [(len(body["prompt"].split()), body["max_tokens"]) for _, body in scripted.asked]
    assert sorted(asked) == [(4, 2), (9, 5)]


def test_a_page_with_plots(server: tuple[str, Scripted], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    url, _ = server
    path = tmp_path / "load.html"
    assert bench(url, "--plot", str(path)) == 0
    page = path.read_text()
    assert page.count("<svg") == 6
    for words in ("TTFT", "TPOT", "E2EL", "The generator", "scripted"):
        assert words in page


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--goodput", "itl:3"], "--goodput='itl:3' must be ttft, tpot or e2el"),
        (["--tenant", "a"], "--tenant='a'=... must be NAME=KEY"),
        (["--slo-class", "a=1"], "--slo-class='a=1' must be NAME=TTFT:TPOT"),
        (["--percentile-metrics", "x"], "use some of ttft,tpot,itl,e2el"),
        (["--metric-percentiles", "101"], "--metric-percentiles='101'"),
        (["--request-rate", "0"], "--request-rate='0' must be a number above 0, or inf"),
        (["--burstiness", "1", "--arrivals", "poisson"], "leave --burstiness out"),
        (["--burstiness", "0"], "--burstiness=0.0"),
        (["--dataset-name", "x"], "--dataset-name='x': use one of random"),
        (["--dataset-name", "custom"], "give --dataset-path"),
        (["--speed", "2"], "--speed is for --dataset-name timed_trace"),
        (["--backend", "x"], "--backend='x': use one of openai"),
        (["--extra-body", "[]"], "must be a JSON object"),
        (["--input-len", "0"], "--input-len=0: give more than 0"),
        (["--num-prompts", "1.5K"], "1.5K"),
        (["--num-prompts", "0"], "--num-prompts=0: give at least 1"),
        (["--save-result", "--result-dir", "/none"], "--result-dir='/none' is no folder"),
        (["--base-url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_sent(
    args: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "serve", *args]) == 2
    assert why in capsys.readouterr().err


def test_how_options_are_read() -> None:
    assert read_goals(["ttft:200 tpot:50.5", "e2el:1000"]) == Goals(0.2, 0.0505, 1.0)
    assert read_goals([]) is None
    assert read_tenants(["a=sk:1:3", "b=sk"]) == [Tenant("a", "sk:1", 3.0), Tenant("b", "sk")]
    assert read_slo_classes(["c=500:50:2"]) == [SloClass("c", Goals(0.5, 0.05), 2.0)]
    assert read_slo_classes(["c=500:50"])[0].share == 1.0
    assert read_percentiles("50,99.9") == [50.0, 99.9]
    assert read_metrics("itl,e2el") == ["itl", "e2el"]
    with pytest.raises(ConfigError, match="--tenant names 'a' twice"):
        read_tenants(["a=1x", "a=2x"])
    with pytest.raises(ConfigError, match="--goodput says ttft twice"):
        read_goals(["ttft:1", "ttft:2"])


@pytest.mark.parametrize(
    ("text", "count"), [("7", 7), ("1k", 1000), ("1K", 1024), ("25.6k", 25600), ("2M", 2**21)]
)
def test_counts_as_people_write_them(text: str, count: int) -> None:
    assert read_count(text) == count


@pytest.mark.parametrize("text", ["", "-1", "1.5", "1.5K", "k", "1kk", "1 k"])
def test_no_counts(text: str) -> None:
    with pytest.raises(ValueError, match="is no whole number"):
        read_count(text)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_the_real_server(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    with http_server() as url:
        assert bench(url, "--backend", backend, "--ignore-eos", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["completed"], result["failures"]) == (6, {})
    assert result["total_output_tokens"] == 18
    assert result["total_input_tokens"] > 6 * 5  # the toy has a token a byte
    assert result["mean_ttft_ms"] > 0
