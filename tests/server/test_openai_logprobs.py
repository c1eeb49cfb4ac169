"""Log-probabilities in both styles, and prompts that are echoed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from serving import MODEL, http_server

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with http_server() as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def post(client: openai.OpenAI, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{client.base_url}{path}", json={"model": MODEL, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_completions(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "ab", "max_tokens": 6, "logprobs": 3, "seed": 1}
    (choice,) = client.completions.create(**asked).choices
    scores = choice.logprobs
    assert scores is not None and scores.tokens and scores.token_logprobs and scores.top_logprobs
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == 6
    for name, value, top in zip(
        scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True
    ):
        assert top[name] == value <= 0 and 3 <= len(top) <= 4
        assert sum(math.exp(one) for one in top.values()) <= 1.0001
    assert scores.text_offset is not None and scores.text_offset[0] == 0
    assert all(offset <= len(choice.text) for offset in scores.text_offset)
    parts: dict[str, list[Any]] = {name: [] for name in scores.model_dump()}
    for chunk in client.completions.create(**asked, stream=True):
        found = chunk.choices[0].logprobs
        assert found is not None
        for name, values in found.model_dump().items():
            parts[name] += values
    assert parts == scores.model_dump()


def test_chats(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_completion_tokens": 6,
        "logprobs": True,
        "top_logprobs": 3,
        "seed": 1,
    }
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 6
    data = b"".join(bytes(word.bytes or ()) for word in choice.logprobs.content)
    assert data.decode(errors="replace") == choice.message.content
    for word in choice.logprobs.content:
        values = [one.logprob for one in word.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert word.logprob <= values[0]
    streamed = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        found = chunk.choices[0].logprobs
        streamed += (found and found.content) or []
    assert [one.model_dump() for one in streamed] == [
        one.model_dump() for one in choice.logprobs.content
    ]


def test_chat_without_alternatives(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=2, logprobs=True
    ).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [word.top_logprobs for word in choice.logprobs.content] == [[], []]


def test_an_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "a prompt", "echo": True, "logprobs": 2, "temperature": 0}
    (only,) = client.completions.create(**asked, max_tokens=0).choices
    assert only.text == "a prompt" and only.finish_reason == "length"
    (longer,) = client.completions.create(**asked, max_tokens=4).choices
    assert longer.text.startswith("a prompt")
    for choice, count in ((only, 8), (longer, 12)):
        scores = choice.logprobs
        assert scores is not None and scores.token_logprobs and scores.text_offset
        assert scores.tokens is not None and scores.tokens[:8] == list("a prompt")
        assert len(scores.token_logprobs) == len(scores.text_offset) == count
        assert scores.token_logprobs[0] is None and scores.token_logprobs[1] is not None
        assert scores.text_offset[:8] == list(range(8))
    usage = client.completions.create(**asked, max_tokens=0).usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (8, 0)


def test_an_echo_in_a_stream(client: openai.OpenAI) -> None:
    for count in (0, 5):
        asked = {
            "model": MODEL,
            "prompt": ["one", "another"],
            "echo": True,
            "max_tokens": count,
            "logprobs": 0,
            "temperature": 0,
        }
        whole = client.completions.create(**asked).choices
        texts, scores = ["", ""], [[], []]
        for chunk in client.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
                texts[choice.index] += choice.text
                scores[choice.index] += choice.logprobs.token_logprobs
        assert texts == [choice.text for choice in whole]
        assert scores == [choice.logprobs and choice.logprobs.token_logprobs for choice in whole]


def test_an_echo_of_token_ids_is_their_text(client: openai.OpenAI) -> None:
    root = str(client.base_url).removesuffix("v1/")
    ids = httpx.post(f"{root}tokenize", json={"prompt": "né"}).json()["tokens"]
    (choice,) = client.completions.create(model=MODEL, prompt=ids, echo=True, max_tokens=0).choices
    assert choice.text == "né"


def test_prompt_logprobs_in_vllms_style(client: openai.OpenAI) -> None:
    whole = post(client, "completions", prompt="abc", max_tokens=1, prompt_logprobs=1)
    scores = whole["choices"][0]["prompt_logprobs"]
    assert len(scores) == 3 and scores[0] is None
    chat = post(client, "chat/completions", messages=MESSAGES, max_tokens=1, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    for entry in (*scores[1:], *chat["prompt_logprobs"][1:]):
        for one in entry.values():
            assert one["logprob"] <= 0 and one["rank"] >= 1 and one["decoded_token"]


def test_tokens_as_ids(client: openai.OpenAI) -> None:
    whole = post(
        client,
        "completions",
        prompt="abc",
        max_tokens=3,
        logprobs=0,
        return_tokens_as_token_ids=True,
        return_token_ids=True,
    )
    (choice,) = whole["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert len(choice["prompt_token_ids"]) == 3
