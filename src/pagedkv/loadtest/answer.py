"""What came back of a request, read from the bytes of its stream as they arrive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

# Ends of a sample that OpenAI's servers name; any other is that of a request which failed.
_ENDS = frozenset(("stop", "length", "tool_calls", "function_call", "content_filter"))


@dataclass(slots=True)
class Answer:
    """Times are on the clock of whoever reads.

    times: of each chunk that brought text or an end, in order; the first is that of the first
    token. Token counts are the server's; where it gives none, each chunk counts as a token.
    error: why the request counts as failed.
    """

    times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    error: str | None = None


class AnswerReader:
    """Reads a server-sent event stream of `/v1/completions` or `/v1/chat/completions`.

    Feed it bytes in any pieces; `finish` says what became of the request. on_text: is given the
    text as it comes.
    """

    def __init__(self, on_text: Callable[[str], None] = lambda text: None) -> None:
        self._answer, self._on_text = Answer(), on_text
        self._rest = b""
        self._done = False
        self._text: list[str] = []
        self._num_texts = 0  # chunks that brought text
        self._end: float | None = None

    def feed(self, data: bytes, now: float) -> None:
        """now: when the bytes came."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)

    def finish(self) -> Answer:
        """The stream is over: one that has not said so was cut."""
        answer = self._answer
        answer.text = "".join(self._text)
        if self._end is not None and (not answer.times or self._end > answer.times[-1]):
            answer.times.append(self._end)
        if not answer.output_tokens:
            answer.output_tokens = self._num_texts
        if answer.error is None and not self._done:
            answer.error = "the stream was cut: it has no [DONE]"
        return answer

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError:
            self._fail(f"an event is no JSON: {data[:80]!r}")
            return
        if not isinstance(event, dict):
            self._fail(f"an event is no object: {data[:80]!r}")
            return
        if event.get("error") is not None:
            self._fail(f"the server said: {error_message(event)}")
        for choice in event.get("choices") or ():
            self._take_choice(choice, now)
        usage = event.get("usage")
        if usage:
            self._answer.prompt_tokens = usage.get("prompt_tokens") or 0
            self._answer.output_tokens = usage.get("completion_tokens") or 0
            details = usage.get("prompt_tokens_details") or {}
            self._answer.cached_tokens = details.get("cached_tokens") or 0

    def _take_choice(self, choice: dict[str, Any], now: float) -> None:
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        # Reasoning and tool calls are tokens, too; the role is none.
        if text or any(value for name, value in delta.items() if name != "role"):
            self._answer.times.append(now)
            self._num_texts += 1
            self._text.append(text)
            self._on_text(text)
        reason = choice.get("finish_reason")
        if reason is not None:
            self._end = now
            if reason not in _ENDS:
                why = choice.get("error")
                self._fail(f"it ended with {reason!r}" + (f": {why}" if why else ""))

    def _fail(self, why: str) -> None:
        if self._answer.error is None:
            self._answer.error = why


def refusal(text: str) -> str:
    """What the body of an answer says that is none: its error's message, or all of it."""
    try:
        return error_message(msgspec.json.decode(text))
    except (ValueError, RecursionError):
        return error_message(text)


def refused(where: str, status: int, text: str) -> str:
    """What the user of a command is told when a server does not answer as it should."""
    remedy = "; give --api-key or set PAGEDKV_API_KEY" if status == 401 else ""
    return f"{where} answers {status}: {refusal(text)}{remedy}"


def error_message(body: Any) -> str:
    """The message in a body that reports an error, in OpenAI's form or another, as one line.

    It is somebody else's: what could not be printed as it is becomes "?".
    """
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    line = " ".join(str(message).split())[:200]
    return "".join(c if c.isprintable() else "?" for c in line)
