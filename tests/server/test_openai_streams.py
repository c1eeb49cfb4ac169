"""A stream adds up to the whole answer, whatever the tokens are and however it is read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llm import byte_tokenizer
from tokenizers import Tokenizer

from pagedkv.engine.detokenizer import token_bytes
from pagedkv.engine.output import OutputProcessor
from pagedkv.engine.requests import Prepared
from pagedkv.errors import EngineDeadError
from pagedkv.scheduling.messages import Abort, Add, Delta, RequestUsage
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.step import TokenLogprobs
from pagedkv.server.async_engine import Stream
from pagedkv.server.openai.answers import DONE, Answer, Form
from pagedkv.server.openai.chat import ChatForm, ChatRequest
from pagedkv.server.openai.completions import CompletionForm, CompletionRequest
from pagedkv.server.openai.running import Running
from pagedkv.server.openai.words import Scores, Words

NUM_SMOLLM2 = 49152


@cache
def byte_level() -> Tokenizer:
    return byte_tokenizer().backend_tokenizer


@cache
def smollm2() -> Tokenizer:
    import torch

    from pagedkv.models.embedded import embedded_folder
    from pagedkv.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(embedded_folder(torch.float32))
    assert tokenizer is not None
    return tokenizer.backend_tokenizer


@cache
def token_of_byte() -> dict[int, int]:
    return {token_bytes(byte_level(), token)[0]: token for token in range(256)}


class Scripted:
    """Stands for an engine: what it brings is put into the streams by the test."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, num_prompts: int = 1) -> None:
        self.aborts: list[Abort] = []
        self.processor = OutputProcessor(tokenizer, self.aborts.append)
        self.streams: dict[str, Stream] = {}
        self.cancelled: list[str] = []
        self.prepared = [
            Prepared(Add(f"r{i}", (1, 2, 3), params, 0.0, 0), None) for i in range(num_prompts)
        ]

    def submit(self, prepared: Prepared) -> Stream:
        name = prepared.add.request_id
        self.processor.add(prepared.add, name, prepared.prompt)
        self.streams[name] = Stream(name)
        return self.streams[name]

    def cancel(self, stream: Stream) -> None:
        self.cancelled.append(stream.request_id)

    def bring(self, *deltas: Delta) -> None:
        """Deltas, and then the ends of the samples that have met a stop string."""
        self._put(deltas)
        aborts, self.aborts[:] = list(self.aborts), []
        self._put([Delta(a.request_id, a.sample or 0, usage=RequestUsage()) for a in aborts])

    def _put(self, deltas: Sequence[Delta]) -> None:
        for output in self.processor.process(deltas, 1.0):
            self.streams[output.request_id].put(output)


def answer_of(engine: Scripted, form: Form, n: int = 1, **options: bool) -> Answer:
    running = Running(engine, engine.prepared)
    return Answer(running, form, id="x", model="m", created=0, n=n, **options)


def completion_form(tokenizer: Tokenizer, n: int = 1, **fields: Any) -> CompletionForm:
    scores = Scores(Words(tokenizer), as_ids=False, top=fields.get("logprobs", 0))
    return CompletionForm(CompletionRequest(prompt="x", **fields), scores, n, None)


def chat_form(tokenizer: Tokenizer, **fields: Any) -> ChatForm:
    messages = [{"role": "user", "content": "x"}]
    scores = Scores(Words(tokenizer), as_ids=False, top=fields.get("top_logprobs", 0))
    return ChatForm(ChatRequest(messages=messages, **fields), scores)


def parsed(lines: list[bytes]) -> list[Any]:
    """The values of events; the last one, [DONE], is left out, and must be there."""
    events = b"".join(lines).split(b"\n\n")
    assert events.pop() == b"" and events.pop() + b"\n\n" == DONE
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


async def played(
    answer: Answer, engine: Scripted, parts: list[tuple[list[int], bool]], logprobs: bool = False
) -> list[bytes]:
    """What a reader gets who is given time to read after the parts that say so."""
    lines: list[bytes] = []

    async def read() -> None:
        async for line in answer.events():
            lines.append(line)

    reader = asyncio.create_task(read())
    for i, (tokens, pause) in enumerate(parts):
        scored = tuple(scored_token(token) for token in tokens) if logprobs else ()
        end = "length" if i == len(parts) - 1 else None
        engine.bring(Delta("r0", 0, tuple(tokens), scored, finish_reason=end))
        for _ in range(8 if pause else 0):
            await asyncio.sleep(0)
    await asyncio.wait_for(reader, 10)
    return lines


def scored_token(token: int) -> TokenLogprobs:
    ids = np.array([token, 1, 2], dtype=np.int32)
    return TokenLogprobs(ids, np.array([-1.5, -0.5, -3.0], dtype=np.float32), 2)


def expected(tokenizer: Tokenizer, tokens: list[int], stops: list[str]) -> str:
    """The text up to the stop string that is complete first, the longest of those."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


parts = st.lists(st.integers(1, 4), min_size=1, max_size=12)
pauses = st.lists(st.booleans(), min_size=12, max_size=12)


def split(tokens: list[int], sizes: list[int], pauses: list[bool]) -> list[tuple[list[int], bool]]:
    found, at = [], 0
    for size, pause in zip(sizes, pauses, strict=False):
        found.append((tokens[at : at + size], pause))
        at += size
    return [*found, (tokens[at:], True)]


def check(
    tokenizer: Tokenizer, tokens: list[int], stops: list[str], sizes: list[int], pauses: list[bool]
) -> str:
    params = SamplingParams(max_tokens=200, stop=stops, logprobs=2)
    text = expected(tokenizer, tokens, stops)
    script = split(tokens, sizes, pauses)

    async def main() -> None:
        engine = Scripted(tokenizer, params)
        form = completion_form(tokenizer, logprobs=2)
        lines = await played(answer_of(engine, form), engine, script, logprobs=True)
        streamed, names = "", []
        for event in parsed(lines):
            (choice,) = event["choices"]
            streamed += choice["text"]
            names += choice["logprobs"]["tokens"]
            assert text.startswith(streamed), "a character that the text does not have"
        assert streamed == text
        engine = Scripted(tokenizer, params)
        whole = answer_of(engine, completion_form(tokenizer, logprobs=2))
        waiting = asyncio.create_task(whole.whole())
        await asyncio.sleep(0)
        for i, (part, _) in enumerate(script):
            end = "length" if i == len(script) - 1 else None
            scored = tuple(map(scored_token, part))
            engine.bring(Delta("r0", 0, tuple(part), scored, finish_reason=end))
        (choice,) = (await asyncio.wait_for(waiting, 10))["choices"]
        assert choice["text"] == text
        assert choice["logprobs"]["tokens"] == names
        assert choice["finish_reason"] == event["choices"][0]["finish_reason"]
        engine = Scripted(tokenizer, params)
        chat = chat_form(tokenizer, logprobs=True, top_logprobs=2)
        events = parsed(await played(answer_of(engine, chat), engine, script, logprobs=True))
        deltas = [event["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content", "") for delta in deltas) == text
        assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)

    asyncio.run(main())
    return text


stop_strings = st.lists(st.text("ab☃é", min_size=1, max_size=4), max_size=3)


@settings(deadline=None)
@given(st.binary(max_size=24), stop_strings, parts, pauses)
def test_any_bytes(data: bytes, stops: list[str], sizes: list[int], pauses: list[bool]) -> None:
    check(byte_level(), [token_of_byte()[byte] for byte in data], stops, sizes, pauses)


@settings(deadline=None)
@given(st.text("ab☃é\U0001f600", max_size=12), stop_strings, parts, pauses)
def test_valid_text_has_no_replacement_character(
    text: str, stops: list[str], sizes: list[int], pauses: list[bool]
) -> None:
    tokens = [token_of_byte()[byte] for byte in text.encode()]
    assert "\ufffd" not in check(byte_level(), tokens, stops, sizes, pauses)


@settings(deadline=None)
@given(st.lists(st.integers(0, NUM_SMOLLM2 - 1), max_size=16), stop_strings, parts, pauses)
def test_any_ids_of_the_embedded_tokenizer(
    tokens: list[int], stops: list[str], sizes: list[int], pauses: list[bool]
) -> None:
    check(smollm2(), tokens, stops, sizes, pauses)


def test_a_reader_who_comes_late_gets_one_chunk() -> None:
    async def main() -> None:
        engine = Scripted(byte_level(), SamplingParams(max_tokens=9))
        script = [([65], False), ([66], False), ([67], False)]
        lines = await played(answer_of(engine, completion_form(byte_level())), engine, script)
        (event,) = parsed(lines)
        assert event["choices"][0]["finish_reason"] == "length" and "usage" not in event
        assert event["kv"]["cached_tokens"] == 0

    asyncio.run(main())


def test_usage_counts_what_each_chunk_has_brought() -> None:
    async def main() -> None:
        engine = Scripted(byte_level(), SamplingParams(max_tokens=9))
        script = [([65], True), ([66, 67], True), ([68], True)]
        answer = answer_of(
            engine,
            completion_form(byte_level()),
            include_usage=True,
            continuous_usage=True,
        )
        events = parsed(await played(answer, engine, script))
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == [1, 3, 4, 4] and events[-1]["choices"] == []
        assert "kv" in events[-1]

    asyncio.run(main())


def lines_of_a_failure(n: int, *deltas: Delta, dies: bool = False) -> list[Any]:
    async def main() -> list[Any]:
        engine = Scripted(byte_level(), SamplingParams(max_tokens=9, n=n))
        answer = answer_of(engine, completion_form(byte_level(), n=n), n=n)
        engine.bring(*deltas)
        if dies:
            engine.streams["r0"].fail(EngineDeadError("out of memory", "MemoryError"))
        lines = [line async for line in answer.events()]
        events = b"".join(lines).strip().split(b"\n\n")
        return [e if e in DONE else json.loads(e.removeprefix(b"data: ")) for e in events]

    return asyncio.run(main())


@pytest.mark.parametrize(("reason", "code"), [("error", "error"), ("deadline", "deadline")])
def test_an_error_is_the_last_event(reason: str, code: str) -> None:
    failed = Delta("r0", 0, (66,), finish_reason=reason, error="it broke")
    chunk, error = lines_of_a_failure(1, failed)
    assert chunk["choices"][0]["finish_reason"] == reason
    assert chunk["choices"][0]["error"] == "it broke"
    assert (error["error"]["message"], error["error"]["code"]) == ("it broke", code)


def test_a_dead_engine_is_the_last_event() -> None:
    chunk, error = lines_of_a_failure(1, Delta("r0", 0, (66,)), dies=True)
    assert chunk["choices"][0]["finish_reason"] is None
    assert "out of memory" in error["error"]["message"]
    assert error["error"]["code"] == "engine_dead"


def test_a_choice_that_fails_beside_one_that_does_not_is_no_error() -> None:
    failed = Delta("r0", 0, (66,), finish_reason="error", error="it broke")
    well = Delta("r0", 1, (67,), finish_reason="length")
    first, second, done = lines_of_a_failure(2, failed, well)
    assert [first["choices"][0]["finish_reason"], second["choices"][0]["finish_reason"]] == [
        "error",
        "length",
    ]
    assert done == DONE.strip()


def test_requests_of_one_call_end_together() -> None:
    async def main() -> None:
        engine = Scripted(byte_level(), SamplingParams(max_tokens=9), num_prompts=3)
        answer = answer_of(engine, completion_form(byte_level()))
        answer.close()
        assert engine.cancelled == ["r0", "r1", "r2"]

    asyncio.run(main())
