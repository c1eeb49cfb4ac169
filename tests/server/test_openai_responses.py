"""/v1/responses through OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from serving import MODEL, http_server, toy_core
from tiny_llm import VOCAB

from pagedkv.engine.toy import ToyExecutor

ASKED: dict[str, Any] = {
    "model": MODEL,
    "input": "hello",
    "max_output_tokens": 6,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    core = toy_core()
    with http_server(lambda: core) as address:
        yield address
    assert core.scheduler.manager.num_held_blocks == 0 and len(core.scheduler) == 0


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_the_answer_is_that_of_the_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        max_completion_tokens=6,
        temperature=0,
    )
    for given in (
        "hello",
        [{"role": "user", "content": "hello"}],
        [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
    ):
        answer = client.responses.create(**ASKED | {"input": given})
        assert answer.output_text == chat.choices[0].message.content
        assert answer.status == "incomplete" and answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.usage is not None and chat.usage is not None
        assert answer.usage.input_tokens == chat.usage.prompt_tokens
        assert answer.usage.output_tokens == 6
        assert answer.model_extra is not None and answer.model_extra["kv"]["preemptions"] == 0


def test_a_stream_adds_up_to_the_answer(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED)
    events = list(client.responses.create(**ASKED, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.incomplete"
    assert text == whole.output_text == last.response.output_text
    assert last.response.usage is not None and whole.usage is not None
    assert last.response.usage.output_tokens == whole.usage.output_tokens


def test_asynchronous_helper(url: str) -> None:
    async def main() -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        async with client.responses.stream(**ASKED) as stream:
            text = "".join(
                [e.delta async for e in stream if e.type == "response.output_text.delta"]
            )
        assert text == (await client.responses.create(**ASKED)).output_text

    asyncio.run(main())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input", []),
        ("input", 5),
        ("input", [{"type": "function_call_output", "output": "x"}]),
        ("previous_response_id", "resp_1"),
        ("tools", []),
        ("background", True),
        ("max_output_tokens", 0),
        ("temperature", -1),
        ("truncation", "auto"),
        ("text", {"format": {"type": "json_schema", "name": "with a blank", "schema": {}}}),
    ],
)
def test_what_is_refused(url: str, field: str, value: Any) -> None:
    answer = httpx.post(f"{url}/v1/responses", json={**ASKED, field: value}, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_a_failure_is_the_last_event() -> None:
    class Faulty(ToyExecutor):
        def collect(self, ticket):
            raise RuntimeError("the model stumbled")

    core = toy_core(executor=Faulty(64, 4, vocab_size=VOCAB))
    with http_server(lambda: core) as url:
        whole = httpx.post(f"{url}/v1/responses", json=ASKED, timeout=60)
        assert whole.status_code == 500 and "stumbled" in whole.json()["error"]["message"]
        stream = httpx.post(f"{url}/v1/responses", json={**ASKED, "stream": True}, timeout=60)
        *_, last = stream.text.strip().split("\n\n")
        data = json.loads(last.partition("data: ")[2])
        assert data["type"] == "response.failed" and data["response"]["status"] == "failed"
        assert "stumbled" in data["response"]["error"]["message"]
    assert core.scheduler.manager.num_held_blocks == 0
