"""The endpoints through OpenAI's own client: what is asked for is what comes."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from serving import MODEL, http_server, toy_core

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http_server() as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "pagedkv")
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("another")
    assert caught.value.code == "model_not_found"


def test_version(url: str) -> None:
    assert httpx.get(f"{url}/version").json()["version"]


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="a prompt", max_tokens=8, temperature=0)
    (choice,) = answer.choices
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert choice.finish_reason == "length" and choice.index == 0
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (8, 8, 16)


def test_choices_of_many_prompts_are_in_order(client: openai.OpenAI) -> None:
    prompts = ["one", "another", "a third one"]
    alone = [
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=6, n=2, seed=5).choices
        for prompt in prompts
    ]
    ids = [list(prompt.encode()) for prompt in prompts]
    texts = [choice.text for choices in alone for choice in choices]
    tokens = [httpx_tokens(client, prompt) for prompt in prompts]
    for given in (prompts, tokens):
        answer = client.completions.create(
            model=MODEL, prompt=given, max_tokens=6, n=2, seed=5, stream=False
        )
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert [choice.text for choice in answer.choices] == texts
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == 36
        chunks = client.completions.create(
            model=MODEL, prompt=given, max_tokens=6, n=2, seed=5, stream=True
        )
        streamed = [""] * 6
        for chunk in chunks:
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        assert streamed == texts


def httpx_tokens(client: openai.OpenAI, prompt: str) -> list[int]:
    root = str(client.base_url).removesuffix("v1/")
    return list(httpx.post(f"{root}tokenize", json={"prompt": prompt}).json()["tokens"])


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=8, temperature=0
    )
    (choice,) = answer.choices
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_completion_tokens=8, temperature=0, stream=True
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_tokenize_and_back(url: str) -> None:
    asked = {"model": MODEL, "prompt": "a ☃", "return_token_strs": True}
    answer = httpx.post(f"{url}/tokenize", json=asked).json()
    assert answer["count"] == len(answer["tokens"]) == 5 and answer["max_model_len"] == 64
    assert answer["token_strs"] == ["a", " ", "bytes:\\xe2", "bytes:\\x98", "bytes:\\x83"]
    back = httpx.post(f"{url}/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": "a ☃"}
    chat = httpx.post(f"{url}/tokenize", json={"messages": MESSAGES}).json()
    text = httpx.post(f"{url}/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert text == "[user]hello[assistant]"


def test_a_pool_smaller_than_the_context_is_what_the_model_offers() -> None:
    with http_server(lambda: toy_core(num_blocks=8, block_size=4)) as url:
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == 32
