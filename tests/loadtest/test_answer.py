"""What a stream of events says, whatever pieces it comes in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagedkv.loadtest.answer import AnswerReader, error_message, refusal


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str, reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": piece, "finish_reason": reason}])


def delta(reason: str | None = None, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": reason}])


USAGE = event(
    choices=[],
    usage={
        "prompt_tokens": 11,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 8},
    },
)
DONE = b"data: [DONE]\n\n"


def test_times_text_and_counts() -> None:
    reader = AnswerReader()
    for now, data in enumerate([text("a"), text("bc"), text("", "length") + USAGE + DONE]):
        reader.feed(data, float(now))
    answer = reader.finish()
    assert answer.error is None
    assert answer.times == [0.0, 1.0, 2.0]
    assert answer.text == "abc"
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (11, 5, 8)


def test_an_end_that_comes_with_the_last_text_is_no_further_chunk() -> None:
    reader = AnswerReader()
    reader.feed(text("a"), 1.0)
    reader.feed(text("b") + text("", "stop") + DONE, 2.0)
    assert reader.finish().times == [1.0, 2.0]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_pieces_of_any_size_say_the_same(size: int) -> None:
    whole = b": ping\r\n\r\n" + text("a\u00e9") + text("b", "stop").replace(b"\n", b"\r\n")
    whole += USAGE + DONE
    reader = AnswerReader()
    for start in range(0, len(whole), size):
        reader.feed(whole[start : start + size], 1.0)
    answer = reader.finish()
    assert (answer.error, answer.text, answer.output_tokens) == (None, "a\u00e9b", 5)


def test_the_role_of_a_chat_is_no_token() -> None:
    reader = AnswerReader()
    reader.feed(delta(role="assistant", content=""), 1.0)
    reader.feed(delta(content="hi"), 2.0)
    reader.feed(delta(tool_calls=[{"index": 0}]), 3.0)
    reader.feed(delta("tool_calls") + DONE, 3.0)
    answer = reader.finish()
    assert answer.times == [2.0, 3.0]
    assert answer.output_tokens == 2  # chunks: the server has not said how many tokens
    assert answer.error is None


def test_an_answer_without_text_has_the_time_of_its_end() -> None:
    reader = AnswerReader()
    reader.feed(text("", "stop") + DONE, 4.0)
    assert reader.finish().times == [4.0]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (text("a"), "the stream was cut: it has no [DONE]"),
        (event(error={"message": "out\nof luck"}) + DONE, "the server said: out of luck"),
        (text("a", "abort") + DONE, "it ended with 'abort'"),
        (
            event(choices=[{"text": "", "finish_reason": "error", "error": "why"}]) + DONE,
            "it ended with 'error': why",
        ),
        (b"data: {\n\n" + DONE, "an event is no JSON: b'{'"),
        (b"data: 3\n\n" + DONE, "an event is no object: b'3'"),
        (b"", "the stream was cut: it has no [DONE]"),
    ],
)
def test_what_counts_as_failed(data: bytes, why: str) -> None:
    reader = AnswerReader()
    reader.feed(data, 1.0)
    assert reader.finish().error == why


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "no"}}, "no"),
        ({"error": "no"}, "no"),
        ({"detail": 1}, "{'detail': 1}"),
        ("<html>\n", "<html>"),
        ({"error": {"message": "\x1b[31mred"}}, "?[31mred"),
    ],
)
def test_messages_of_errors(body: Any, message: str) -> None:
    assert error_message(body) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"error": {"message": "no"}}', "no"),
        ("<html>\n", "<html>"),
        ('"no"', "no"),
        ("[" * 100_000, "[" * 200),
        ("", ""),
    ],
)
def test_what_a_refusal_says(text: str, message: str) -> None:
    assert refusal(text) == message
