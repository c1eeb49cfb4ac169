"""What each field does, and what happens to those that are wrong, unknown or not implemented."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from serving import MODEL, GatedExecutor, http_server, settings, toy_core
from tiny_llm import EOS, VOCAB, byte_tokenizer

from pagedkv.engine.requests import RequestReader
from pagedkv.engine.toy import ToyExecutor
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import MAX_N, SamplingParams
from pagedkv.server.app import create_app
from pagedkv.server.async_engine import AsyncEngine
from pagedkv.server.openai.completions import CompletionRequest
from pagedkv.server.openai.parameters import prepare, sampling
from pagedkv.server.openai.protocol import parse
from pagedkv.server.settings import SloClass

GOOD: dict[str, Any] = {"model": MODEL, "prompt": "a prompt", "max_tokens": 5, "temperature": 0}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello"}],
    "max_completion_tokens": 5,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    core = toy_core()
    with http_server(lambda: core) as address:
        yield address
    assert core.scheduler.manager.num_held_blocks == 0 and len(core.scheduler) == 0


def post(url: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=60)


def choice(url: str, **body: Any) -> Any:
    answer = post(url, **GOOD | body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def refused(answer: httpx.Response, param: str | None, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == param, error
    return str(error["message"])


@pytest.mark.parametrize("prompt", ["", [""], [[]], []])
def test_an_empty_prompt(url: str, prompt: Any) -> None:
    refused(post(url, **GOOD | {"prompt": prompt}), "prompt")
    choice(url)


def test_an_empty_conversation(url: str) -> None:
    refused(post(url, "/v1/chat/completions", **CHAT | {"messages": []}), "messages")


WRONG: tuple[tuple[str, Any], ...] = (
    ("temperature", -1),
    ("top_p", 0),
    ("top_p", 2),
    ("top_k", -5),
    ("logprobs", 10**6),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("n", 0),
    ("n", MAX_N + 1),
    ("n", 10**9),
    ("stop", [""]),
    ("stop", ["x"] * 500_000),
    ("stop", [1] * 500_000),
    ("stop_token_ids", list(range(100_000))),
    ("logit_bias", {"9999999": 1}),
    ("logit_bias", {str(i): 0 for i in range(100_000)}),
    ("logit_bias", {"5": 10**400}),
    ("prompt", [VOCAB]),
    ("prompt", [10**30]),
    ("prompt", [True]),
    ("prompt", ["x"] * 10_000),
    ("prompt", "x" * 1_000_000),
    ("seed", 2**63),
    ("seed", 10**400),
    ("cache_salt", ""),
    ("cache_salt", "x" * 1025),
    ("deadline_ms", 0),
    ("ttft_slo_ms", 1e300),
    ("priority", 10**9),
    ("truncate_prompt_tokens", 0),
    ("request_id", "with a blank"),
    ("n", True),
    ("n", "2"),
    ("temperature", "1"),
)


def test_wrong_values_are_named_and_harm_nobody() -> None:
    executor = GatedExecutor(ToyExecutor(64, 4, vocab_size=VOCAB))
    core = toy_core(executor=executor)
    streaming = {**GOOD, "stream": True}
    with (
        http_server(lambda: core) as url,
        httpx.stream("POST", f"{url}/v1/completions", json=streaming, timeout=60) as beside,
    ):
        assert executor.reached.acquire(timeout=60)
        for field, value in WRONG:
            refused(post(url, **GOOD | {field: value}), field)
            assert httpx.get(f"{url}/health").status_code == 200
        executor.allow(None)
        assert beside.read().endswith(b"data: [DONE]\n\n")
    assert core.scheduler.manager.num_held_blocks == 0


@pytest.mark.parametrize(
    "raw",
    [
        b'"temperature": NaN',
        b'"temperature": -Infinity',
        b'"temperature": 1e999',
        b'"logit_bias": {"1": NaN}',
        b'"n": ' + b"9" * 5000,
        b'"user": ' + b"[" * 50_000 + b"]" * 50_000,
        b'"user": "\\ud800"',
        b'"user": "\xff"',
        b'"user": {',
    ],
)
def test_what_is_no_json(url: str, raw: bytes) -> None:
    body = b'{"model": "toy", "prompt": "x", ' + raw + b"}"
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{url}/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["message"]
    choice(url)


def test_json_that_does_not_say_so(url: str) -> None:
    answer = httpx.post(
        f"{url}/v1/completions",
        content=json.dumps(GOOD),
        headers={"content-type": "text/plain"},
    )
    assert "application/json" in refused(answer, None)


def test_what_openai_defines_and_nothing_here_needs(url: str) -> None:
    ignored = {
        "user": "someone",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
    }
    assert choice(url, **ignored)["text"] == choice(url)["text"]
    answer = post(url, "/v1/chat/completions", **CHAT, **ignored, reasoning_effort="low")
    assert answer.status_code == 200, answer.text


def test_null_is_as_good_as_nothing(url: str) -> None:
    names = ("n", "stop", "seed", "logit_bias", "suffix", "logprobs", "stream", "top_p", "user")
    assert choice(url, **dict.fromkeys(names))["text"] == choice(url)["text"]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "suffix", "end"),
        ("/v1/completions", "prompt_embeds", "AAAA"),
        ("/v1/completions", "bad_words", ["x"]),
        ("/v1/completions", "best_of", 3),
        ("/v1/completions", "spaces_between_special_tokens", False),
        ("/v1/completions", "length_penalty", 1.0),
        ("/v1/completions", "stream_options", {"include_usage": True}),
        ("/v1/chat/completions", "audio", {"voice": "x"}),
        ("/v1/chat/completions", "functions", []),
        ("/v1/chat/completions", "chat_template", "{{ messages }}"),
        ("/v1/chat/completions", "top_logprobs", 3),
        ("/v1/chat/completions", "modalities", ["audio"]),
    ],
)
def test_what_would_change_the_answer_is_refused(
    url: str, path: str, field: str, value: Any
) -> None:
    good = GOOD if path == "/v1/completions" else CHAT
    assert field in refused(post(url, path, **good | {field: value}), field)


def test_unknown_fields_are_refused_with_the_nearest_known_one(url: str) -> None:
    message = refused(post(url, **GOOD, max_token=3), "max_token")
    assert message == "there is no field 'max_token': is it 'max_tokens'?"
    refused(post(url, **GOOD, tenant="another"), "tenant")


def test_older_names_of_vllm_lead_to_the_newer(url: str) -> None:
    message = refused(post(url, **GOOD, guided_json={}), "guided_json")
    assert message == "there is no field 'guided_json': use structured_outputs={'json': ...}"


@pytest.mark.parametrize(
    ("field", "value", "start"),
    [
        ("tools", [{"type": "function", "name": "x"}], "tools.0.name: Extra"),
        ("tools", [{"type": "function", "function": {"name": "x", "a" * 999: 1}}], "tools.0.func"),
        ("stream_options", {"usage": True}, "stream_options.usage: Extra"),
        ("stop", ["a", 5], "stop.1: "),
        ("n", 0, "n=0: Input should be greater"),
    ],
)
def test_a_wrong_part_of_a_field_is_told_by_its_place(
    url: str, field: str, value: Any, start: str
) -> None:
    message = refused(post(url, "/v1/chat/completions", **CHAT | {field: value}), field)
    assert message.startswith(start)
    assert len(message) < 300


def test_unknown_models(url: str) -> None:
    answer = post(url, **GOOD | {"model": "another"})
    assert refused(answer, "model", 404).startswith("the model 'another' is not served")
    assert answer.json()["error"]["code"] == "model_not_found"


def test_ids_are_the_clients_and_may_be_in_use(url: str) -> None:
    headers = {"X-Request-Id": "mine"}

    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(f"{url}/v1/completions", json=GOOD, headers=headers, timeout=60)

    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient() as client:
            return list(await asyncio.gather(*(ask(client) for _ in range(4))))

    for answer in asyncio.run(main()):
        assert answer.status_code == 200 and answer.headers["X-Request-Id"] == "mine"
        assert answer.json()["id"] == "cmpl-mine"
    answer = post(url, **GOOD, request_id="other")
    assert answer.headers["X-Request-Id"] == "other" and answer.json()["id"] == "cmpl-other"
    first, second = post(url, **GOOD), post(url, **GOOD)
    assert first.json()["id"] != second.json()["id"]


def test_ids_that_no_header_could_hold(url: str) -> None:
    for bad in ("with a blank", "x" * 129):
        answer = httpx.post(f"{url}/v1/completions", json=GOOD, headers={"X-Request-Id": bad})
        refused(answer, "request_id")


def usage_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("application/json"):
        found = answer.json()
        return {"usage": found["usage"], "cached": found["kv"]["cached_tokens"]}
    *_, last, done = answer.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    chunk = json.loads(last.removeprefix("data: "))
    assert chunk["choices"] == []
    return {"usage": chunk["usage"], "cached": chunk["kv"]["cached_tokens"]}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "temperature": 1, "seed": 4},
        {"prompt": ["one", "another prompt"], "n": 2, "seed": 1},
        {"stop_token_ids": list(range(0, 256, 2)), "max_tokens": 20},
        {"prompt": "a prompt of some length, cached"},
    ],
)
def test_usage_of_a_stream_is_that_of_the_answer(url: str, fields: dict[str, Any]) -> None:
    body = GOOD | fields
    post(url, **body)  # so that the others find the same in the cache
    whole = usage_of(post(url, **body))
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    assert usage_of(post(url, **body, **streaming)) == whole
    usage = whole["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < usage["prompt_tokens"] and cached == whole["cached"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_stop_string_is_cut_off_and_counted(url: str) -> None:
    text = choice(url, max_tokens=12)["text"]
    stop = text[2]
    for fields in ({}, {"n": 2}):
        answer = post(url, **GOOD | {"max_tokens": 12, "stop": stop} | fields).json()
        for found in answer["choices"]:
            assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)
            assert found["text"] == text[: text.index(stop)]
    shown = choice(url, max_tokens=12, stop=[stop], include_stop_str_in_output=True)
    assert shown["text"] == text[: text.index(stop) + 1]
    streamed = post(url, **GOOD | {"max_tokens": 12, "stop": stop, "stream": True})
    *chunks, done = streamed.text.strip().split("\n\n")
    last = json.loads(chunks[-1].removeprefix("data: "))
    assert done == "data: [DONE]" and last["choices"][0]["finish_reason"] == "stop"
    assert set(last["kv"]) == {
        "cached_tokens",
        "blocks_peak",
        "preemptions",
        "swapped_blocks",
        "recomputed_tokens",
        "queue_ms",
        "ttft_ms",
    }
    assert last["kv"]["blocks_peak"] > 0 and last["kv"]["ttft_ms"] >= last["kv"]["queue_ms"] >= 0


def test_fields_of_the_engine_are_passed_on() -> None:
    given = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "seed": 3,
        "stop": ["x"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "min_tokens": 2,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "prompt_logprobs": 1,
    }
    body = parse(
        json.dumps({"prompt": "x", **given, "logit_bias": {"7": 100}}).encode(), CompletionRequest
    )
    expected = SamplingParams(**given, logit_bias={7: 100}, max_tokens=9, logprobs=4)
    assert sampling(body, 9, 4) == expected
    assert sampling(parse(b'{"prompt": "x"}', CompletionRequest), 16, None) == SamplingParams()


def test_end_tokens() -> None:
    executor = ToyExecutor(64, 4, vocab_size=VOCAB, eos_token_id=EOS, eos_positions={9, 10, 11})
    with http_server(lambda: toy_core(executor=executor)) as url:
        ended = choice(url, max_tokens=9, return_token_ids=True)
        assert ended["finish_reason"] == "stop" and ended["token_ids"][-1] == EOS
        assert ended["stop_reason"] is None and len(ended["token_ids"]) == 2
        on = choice(url, max_tokens=9, ignore_eos=True, return_token_ids=True)
        assert on["finish_reason"] == "length" and on["token_ids"].count(EOS) == 3
        assert "<|end|>" not in on["text"]
        shown = choice(url, max_tokens=9, ignore_eos=True, skip_special_tokens=False)
        assert shown["text"].count("<|end|>") == 3
        longer = choice(url, max_tokens=9, min_tokens=3, return_token_ids=True)
        assert longer["token_ids"].count(EOS) == 1 and len(longer["token_ids"]) == 4
    with http_server() as url:
        tokens = choice(url, return_token_ids=True)["token_ids"]
        stopped = choice(url, stop_token_ids=[tokens[1]], return_token_ids=True)
        assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", tokens[1])
        assert stopped["token_ids"] == tokens[:2]


def test_a_seed_reproduces_and_samples_follow_it(url: str) -> None:
    several = post(url, **GOOD | {"n": 3, "temperature": 1, "seed": 10}).json()["choices"]
    assert several[2]["text"] == choice(url, temperature=1, seed=12)["text"]
    assert len({one["text"] for one in several}) == 3


def test_a_prompt_is_cut_where_asked(url: str) -> None:
    whole = choice(url, prompt="prompt", return_token_ids=True)["prompt_token_ids"]
    cut = choice(url, prompt="prompt", truncate_prompt_tokens=3, return_token_ids=True)
    assert cut["prompt_token_ids"] == whole[-3:]
    right = choice(
        url,
        prompt="prompt",
        truncate_prompt_tokens=3,
        truncation_side="right",
        return_token_ids=True,
    )
    assert right["prompt_token_ids"] == whole[:3]
    long = choice(url, prompt="x" * 500, truncate_prompt_tokens=-1, return_token_ids=True)
    assert len(long["prompt_token_ids"]) == 64 - 5


def test_a_text_that_can_never_fit_is_not_tokenised(url: str) -> None:
    whole = refused(post(url, **GOOD | {"prompt": "x" * 1_000_000}), "prompt")
    assert "1000000 characters" in whole
    message = {"role": "user", "content": "x" * 1_000_000}
    answer = post(url, "/v1/chat/completions", **CHAT | {"messages": [message]})
    assert "characters" in refused(answer, "prompt")
    assert "tokens" in refused(post(url, **GOOD | {"prompt": "x" * 65}), "prompt")
    assert choice(url, prompt="x" * 63, max_tokens=1)


def test_beams(url: str) -> None:
    found = post(url, **{**GOOD, "n": 3, "use_beam_search": True, "length_penalty": 0.5}).json()[
        "choices"
    ]
    assert [one["index"] for one in found] == [0, 1, 2]
    assert len({one["text"] for one in found}) == 3
    streamed = post(url, **GOOD, n=3, use_beam_search=True, stream=True).text
    texts = ["", "", ""]
    for line in streamed.strip().split("\n\n")[:-1]:
        for one in json.loads(line.removeprefix("data: "))["choices"]:
            texts[one["index"]] += one["text"]
    plain = post(url, **GOOD, n=3, use_beam_search=True).json()["choices"]
    assert texts == [one["text"] for one in plain]
    refused(post(url, **GOOD | {"use_beam_search": True, "temperature": 1}), "temperature")
    refused(post(url, **GOOD, use_beam_search=True, stop="x"), "stop")
    refused(post(url, **GOOD, use_beam_search=True, logprobs=1), "logprobs")


def test_the_newer_name_of_max_tokens_wins(url: str) -> None:
    answer = post(url, "/v1/chat/completions", **CHAT | {"max_tokens": 9})
    assert answer.json()["usage"]["completion_tokens"] == 5
    old = {k: v for k, v in CHAT.items() if k != "max_completion_tokens"}
    answer = post(url, "/v1/chat/completions", **old, max_tokens=4)
    assert answer.json()["usage"]["completion_tokens"] == 4
    unbounded = post(url, "/v1/chat/completions", **old, ignore_eos=True)
    assert unbounded.json()["usage"]["total_tokens"] == 64


def prompt_text(url: str, **fields: Any) -> str:
    whole = post(url, "/v1/chat/completions", **CHAT, return_token_ids=True, **fields)
    assert whole.status_code == 200, whole.text
    ids = whole.json()["prompt_token_ids"]
    return str(post(url, "/detokenize", tokens=ids).json()["prompt"])


def test_templates(url: str) -> None:
    assert prompt_text(url) == "[user]hello[assistant]"
    assert prompt_text(url, add_generation_prompt=False) == "[user]hello"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    message = {"role": "user", "content": parts}
    answer = post(url, "/v1/chat/completions", **CHAT | {"messages": [message]})
    assert answer.status_code == 200
    open_ended = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcd"}]
    asked = CHAT | {"messages": open_ended, "continue_final_message": True}
    ids = post(url, "/v1/chat/completions", **asked, return_token_ids=True).json()
    text = post(url, "/detokenize", tokens=ids["prompt_token_ids"]).json()["prompt"]
    assert text == "[user]a[assistant]bcd"
    refused(
        post(url, "/v1/chat/completions", **asked, add_generation_prompt=True),
        "continue_final_message",
    )
    kwargs = {"chat_template_kwargs": {"tokenize": True}}
    refused(post(url, "/v1/chat/completions", **CHAT, **kwargs), "chat_template_kwargs")


def test_a_deadline_that_has_passed(url: str) -> None:
    answer = post(url, **GOOD, deadline_ms=1e-6)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline"


def test_a_request_that_fails_is_a_500_and_its_neighbour_is_not() -> None:
    class Faulty(ToyExecutor):
        """Fails once, in the step that it is told of."""

        broken = False

        def collect(self, ticket):
            if self.broken:
                self.broken = False
                raise RuntimeError("the model stumbled")
            return super().collect(ticket)

    executor = Faulty(64, 4, vocab_size=VOCAB)
    core = toy_core(executor=executor)
    with http_server(lambda: core) as url:
        executor.broken = True
        answer = post(url, **GOOD)
        assert answer.status_code == 500, answer.text
        assert answer.json()["error"]["type"] == "server_error"
        executor.broken = True
        events = post(url, **GOOD, stream=True).text.strip().split("\n\n")
        assert "error" in json.loads(events[-1].removeprefix("data: "))
        executor.broken = True
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError, match="stumbled"):
            list(client.completions.create(**GOOD, stream=True))
        choice(url)
    assert core.scheduler.manager.num_held_blocks == 0


def test_the_operator_may_allow_less() -> None:
    less = settings(max_prompts=2, max_n=3, max_logprobs=1, max_stop=1, max_logit_bias=1)
    with http_server(make_app=lambda engine: create_app(engine, less)) as url:
        for field, most, more in (
            ("prompt", ["a", "b"], ["a", "b", "c"]),
            ("n", 3, 4),
            ("logprobs", 1, 2),
            ("prompt_logprobs", 1, 2),
            ("stop", "\u2603", ["\u2603", "b"]),
            ("logit_bias", {"1": 1}, {"1": 1, "2": 1}),
        ):
            choice(url, **{field: most})
            message = refused(post(url, **GOOD | {field: more}), field)
            assert "this server allows" in message
        chat = CHAT | {"logprobs": True, "top_logprobs": 2}
        refused(post(url, "/v1/chat/completions", **chat), "top_logprobs")


def test_the_operator_may_promise_what_nobody_asked_for() -> None:
    executor = ToyExecutor(64, 4, vocab_size=VOCAB)
    core = toy_core(executor=executor)
    given = settings(request_timeout=1e-6)
    with http_server(lambda: core, lambda engine: create_app(engine, given)) as url:
        assert post(url, **GOOD).status_code == 504
        assert post(url, **GOOD, deadline_ms=60_000).status_code == 200
    promised = SloClass(ttft_slo_ms=500, priority=7, deadline_ms=2000)
    reader = RequestReader(byte_tokenizer(), lambda add: None)

    def read(**fields: Any) -> Add:
        body = CompletionRequest(prompt="x", **fields)
        return prepare(
            reader,
            "x",
            {"prompt_token_ids": [1]},
            SamplingParams(),
            body,
            max_model_len=64,
            arrival=10.0,
            tenant="a",
            slo=promised,
            timeout=60.0,
        ).add

    add = read()
    assert (add.ttft_slo, add.tpot_slo, add.priority, add.deadline) == (0.5, None, 7, 12.0)
    add = read(ttft_slo_ms=100, tpot_slo_ms=20, priority=0, deadline_ms=500, cache_salt="y")
    assert (add.ttft_slo, add.tpot_slo, add.priority, add.deadline) == (0.1, 0.02, 0, 10.5)
    assert (add.tenant, add.cache_salt) == ("a", "y")


def test_what_nobody_expected_is_an_error_of_the_same_form(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make_app(engine: AsyncEngine) -> FastAPI:
        app = create_app(engine, settings())

        @app.get("/broken")
        async def broken() -> None:
            raise ZeroDivisionError("a secret")

        return app

    with http_server(make_app=make_app) as url:
        answer = httpx.get(f"{url}/broken")
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert error["type"] == "server_error" and "secret" not in error["message"]
        assert httpx.get(f"{url}/nowhere").json()["error"]["type"] == "invalid_request_error"
    assert "a secret" in caplog.text


def test_asynchronous_clients() -> None:
    async def main(url: str) -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        whole = await client.chat.completions.create(**CHAT)
        stream = await client.chat.completions.create(
            **CHAT, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        assert text == whole.choices[0].message.content
        assert chunks[-1].choices == [] and chunks[-1].usage is not None
        assert whole.usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert all(chunk.usage is None for chunk in chunks[:-1])
        extra = await client.completions.create(
            **GOOD, extra_body={"priority": 3, "ttft_slo_ms": 900, "cache_salt": "x"}
        )
        assert extra.model_extra is not None and extra.model_extra["kv"]["preemptions"] == 0

    with http_server() as url:
        asyncio.run(main(url))
