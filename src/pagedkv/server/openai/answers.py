"""An answer, whole or in pieces: what completions and chats have in common.

Only what is new is ever sent: the outputs of a request are cumulative, and a reader that is slow
gets several tokens at once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from pagedkv.engine.output import CompletionOutput, RequestOutput
from pagedkv.errors import RequestError
from pagedkv.scheduling.messages import RequestUsage
from pagedkv.server.openai.errors import FailedAnswer, request_error, server_error
from pagedkv.server.openai.running import Running
from pagedkv.server.openai.words import Offsets

DONE = b"data: [DONE]\n\n"

# Ends that are no answers; and what went wrong, with the status of HTTP for it.
_FAILED = ("error", "abort", "deadline")
_STATUS = {
    "invalid": 400,
    "overload": 429,
    "engine": 500,
    "abort": 503,
    "draining": 503,
    "deadline": 504,
}


@dataclass(slots=True)
class Sent:
    """What a reader has of a choice."""

    chars: int = 0
    tokens: int = 0
    begun: bool = False
    ended: bool = False
    offsets: Offsets = field(default_factory=Offsets)
    calls: list[int] = field(default_factory=list)  # characters of each call's arguments


class Form(Protocol):
    """How one endpoint writes its answers. `object`, `chunk_object`: what it calls them."""

    object: str
    chunk_object: str

    def choice(self, index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """A choice of a whole answer."""
        ...

    def pieces(
        self, index: int, output: RequestOutput, sample: CompletionOutput, sent: Sent
    ) -> Iterable[dict[str, Any]]:
        """The choices of chunks that bring what has not been sent; `sent` is brought up to date."""
        ...

    def extras(self, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
        """More fields of a whole answer."""
        ...


class Answer:
    """What `running` brings, written by `form`.

    id, model, created (seconds): of the answer. n: samples of each request; choice i * n + s is
    sample s of request i. silent: the prompt alone was asked for, the token drawn is not shown.
    Either `whole` or `events` is used, once; `close` afterwards, whatever happened.
    """

    def __init__(
        self,
        running: Running,
        form: Form,
        *,
        id: str,
        model: str,
        created: int,
        n: int,
        silent: bool = False,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        self.id = id
        self._running, self._form, self._n, self._silent = running, form, n, silent
        self._include_usage, self._continuous = include_usage, continuous_usage
        self._head = {"id": id, "created": created, "model": model}
        chunk = msgspec.json.encode(self._head | {"object": form.chunk_object})
        self._prefix = b"data: " + chunk[:-1] + b',"choices":['
        self._outputs: dict[int, RequestOutput] = {}
        self._sent: dict[int, Sent] = {}

    def close(self) -> None:
        """Ends what has not ended."""
        self._running.cancel()

    async def whole(self) -> dict[str, Any]:
        """Waits for the end. FailedAnswer: no choice has one; EngineDeadError."""
        async with aclosing(self._running.outputs()) as outputs:
            async for i, output in outputs:
                self._outputs[i] = output
        shown = {i: self._shown(self._outputs[i]) for i in sorted(self._outputs)}
        if (failed := failure(shown.values())) is not None:
            raise failed
        return {
            **self._head,
            "object": self._form.object,
            "choices": [
                self._form.choice(i * self._n + sample.index, output, sample)
                for i, output in shown.items()
                for sample in output.outputs
            ],
            "usage": usage(shown.values()),
            "kv": kv_figures(shown.values()),
            **self._form.extras(shown),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events. An error is one of them, and the last: no [DONE] follows it."""
        try:
            async with aclosing(self._running.outputs()) as outputs:
                async for i, output in outputs:
                    if lines := self._lines(i, self._shown(output)):
                        yield lines
            if (failed := failure(self._outputs.values())) is not None:
                raise failed
        except RequestError as error:
            yield event(request_error(error)[1])
        except Exception as error:
            yield event(server_error(error)[1])
        else:
            if self._include_usage:
                yield self._usage_event()
            yield DONE

    def _lines(self, i: int, output: RequestOutput) -> bytes:
        self._outputs[i] = output
        choices: list[dict[str, Any]] = []
        # What the request has taken may come a step after its end; the end is then told with it.
        waits = not output.finished and all(sample.finished for sample in output.outputs)
        for sample in output.outputs:
            if waits:
                sample = msgspec.structs.replace(sample, finish_reason=None)
            index = i * self._n + sample.index
            sent = self._sent.get(index)
            if sent is None:
                sent = self._sent[index] = Sent()
            if not sent.ended:
                choices += self._form.pieces(index, output, sample, sent)
                sent.ended = sample.finished
        if not choices:
            return b""
        tail = b"]}\n\n"
        if self._continuous:
            tail = b'],"usage":' + msgspec.json.encode(self._usage()) + b"}\n\n"
        elif self._include_usage:
            tail = b'],"usage":null}\n\n'
        lines = [self._prefix + msgspec.json.encode(choice) + tail for choice in choices]
        if not self._include_usage and self._all_ended():
            kv = msgspec.json.encode(kv_figures(self._outputs.values()))
            lines[-1] = lines[-1][: -len(b"}\n\n")] + b',"kv":' + kv + b"}\n\n"
        return b"".join(lines)

    def _all_ended(self) -> bool:
        return len(self._outputs) == len(self._running) and all(
            output.finished for output in self._outputs.values()
        )

    def _usage_event(self) -> bytes:
        return event(
            {
                **self._head,
                "object": self._form.chunk_object,
                "choices": [],
                "usage": self._usage(),
                "kv": kv_figures(self._outputs.values()),
            }
        )

    def _usage(self) -> dict[str, Any]:
        return usage(self._outputs.values())

    def _shown(self, output: RequestOutput) -> RequestOutput:
        if not self._silent:
            return output
        samples = tuple(
            msgspec.structs.replace(sample, text="", token_ids=(), logprobs=sample.logprobs and ())
            for sample in output.outputs
        )
        return msgspec.structs.replace(output, outputs=samples)


def failure(outputs: Iterable[RequestOutput]) -> FailedAnswer | None:
    """What to answer if no choice has ended as it should."""
    samples = [sample for output in outputs for sample in output.outputs]
    if any(sample.finish_reason not in _FAILED for sample in samples):
        return None
    first = samples[0]
    kind = first.error_type or first.finish_reason or ""
    message = first.error or f"the request has ended: {kind}"
    return FailedAnswer(message, _STATUS.get(kind, 500), kind)


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def usage(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Tokens so far; those of a prompt count once, whatever its number of samples."""
    prompt = completion = cached = 0
    for output in outputs:
        prompt += len(output.prompt_token_ids)
        completion += sum(len(sample.token_ids) for sample in output.outputs)
        cached += output.num_cached_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def kv_figures(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """What the answer has taken: sums over its prompts; times (milliseconds) of the slowest."""
    outputs = list(outputs)
    taken = [output.usage or RequestUsage(output.num_cached_tokens) for output in outputs]
    return {
        **{name: sum(getattr(one, name) for one in taken) for name in RequestUsage._fields},
        "queue_ms": _slowest(output.metrics.queue_time for output in outputs),
        "ttft_ms": _slowest(output.metrics.ttft for output in outputs),
    }


def _slowest(times: Iterable[float | None]) -> float | None:
    known = [seconds for seconds in times if seconds is not None]
    return round(max(known) * 1000, 3) if known else None
