"""POST /v1/responses: text in, text out, nothing stored."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field

from pagedkv.engine.output import RequestOutput
from pagedkv.server.openai.answers import failure, kv_figures, usage
from pagedkv.server.openai.api import Api, Call, respond
from pagedkv.server.openai.body import Body
from pagedkv.server.openai.chat import ChatForm, ChatRequest, chat_params, read_chat
from pagedkv.server.openai.errors import FieldError, server_error
from pagedkv.server.openai.limits import check_limits
from pagedkv.server.openai.protocol import (
    Accepted,
    Milliseconds,
    Refused,
    RequestId,
    Whole,
    checked,
    described,
    read_body,
)
from pagedkv.server.openai.running import Running

_TEXT_PARTS = ("input_text", "output_text", "text")

# Fields that mean the same in a chat.
_SAME = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "request_id",
    "ttft_slo_ms",
    "tpot_slo_ms",
    "deadline_ms",
    "priority",
    "cache_salt",
)


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Any = None  # accepted, without effect


class ResponseRequest(Accepted):
    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    # How it is served: as for chats.
    request_id: RequestId | None = None
    ttft_slo_ms: Milliseconds | None = None
    tpot_slo_ms: Milliseconds | None = None
    deadline_ms: Milliseconds | None = None
    priority: int | None = None
    cache_salt: str | None = None
    # Accepted: they change nothing here.
    reasoning: Any = None
    truncation: Literal["disabled"] | None = None
    stream_options: Any = None
    parallel_tool_calls: Any = None
    # Not implemented.
    previous_response_id: Refused = None
    conversation: Refused = None
    background: Literal[False] | None = None
    include: Refused = None
    max_tool_calls: Refused = None
    prompt: Refused = None
    tools: Refused = None
    tool_choice: Refused = None
    top_logprobs: Refused = None


class ResponseWriter:
    """As `Answer`: what runs, in the words of this endpoint. The first sample is all there is."""

    def __init__(self, running: Running, body: ResponseRequest, call: Call, model: str) -> None:
        self._running, self._body = running, body
        self._id, self._item = f"resp_{call.id}", f"msg_{call.id}"
        self._created, self._model = call.created, model
        self._number = 0

    def close(self) -> None:
        self._running.cancel()

    async def whole(self) -> dict[str, Any]:
        """FailedAnswer, EngineDeadError: there is none."""
        async with aclosing(self._running.outputs()) as outputs:
            async for _, output in outputs:
                last = output
        if (failed := failure([last])) is not None:
            raise failed
        return self._response(last)

    async def events(self) -> AsyncIterator[bytes]:
        """A failure is the last event, `response.failed`."""
        yield b"".join(self._begin())
        try:
            sent = 0
            async with aclosing(self._running.outputs()) as outputs:
                async for _, output in outputs:
                    text = output.outputs[0].text
                    if len(text) > sent:
                        yield self._delta(text[sent:])
                        sent = len(text)
                    last = output
            if (failed := failure([last])) is not None:
                raise failed
        except Exception as error:
            _, body = server_error(error)
            response = self._response(None, "failed") | {
                "error": {"code": "server_error", "message": body["error"]["message"]}
            }
            yield self._event("response.failed", response=response)
        else:
            yield b"".join(self._end(last))

    def _begin(self) -> Iterator[bytes]:
        response = self._response(None, "in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)
        item = {**self._message("", "in_progress"), "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place(), part=_part(""))

    def _delta(self, text: str) -> bytes:
        return self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def _end(self, output: RequestOutput) -> Iterator[bytes]:
        response, text = self._response(output), output.outputs[0].text
        (item,) = response["output"]
        yield self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
        yield self._event("response.content_part.done", **self._place(), part=_part(text))
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{response['status']}", response=response)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"

    def _message(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": self._item,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(text)],
        }

    def _response(self, output: RequestOutput | None, status: str = "completed") -> dict[str, Any]:
        """The whole object; `output` None: there is no text yet, or none at all."""
        body, items, reason = self._body, list[dict[str, Any]](), None
        if output is not None:
            sample = output.outputs[0]
            if sample.finish_reason == "length":
                status, reason = "incomplete", {"reason": "max_output_tokens"}
            items = [self._message(sample.text, status)]
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": items,
            "error": None,
            "incomplete_details": reason,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}} if body.text is None else _given(body.text),
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if output is None else _usage(output),
            **({} if output is None else {"kv": kv_figures([output])}),
        }


def router(api: Api) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/responses", openapi_extra=described(ResponseRequest))
    async def responses(request: Request) -> Response:
        arrival = api.engine.clock()
        body = await read_body(request, ResponseRequest)
        chat = _chat(body)
        call = await Call.of(request, arrival, chat)
        params = chat_params(chat, None)
        check_limits(api.settings.server, chat)

        def write(running: Running, _: ChatForm, model: str) -> ResponseWriter:
            return ResponseWriter(running, body, call, model)

        return await respond(
            api, call, chat, lambda: read_chat(api, call, chat, params, None), write
        )

    return routes


def _chat(body: ResponseRequest) -> ChatRequest:
    """The chat that it stands for. FieldError: an item of the input is none of a chat."""
    given = body.input
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [_message(item) for item in items]
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    fields = {name: getattr(body, name) for name in _SAME}
    own = {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _response_format(body),
    }
    return checked(fields | own, ChatRequest)


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    role, content = item.get("role"), item.get("content")
    if item.get("type", "message") != "message" or not isinstance(role, str):
        raise FieldError(f"input has {item!r:.200}: only messages are implemented", "input")
    if isinstance(content, list):
        content = [
            {**part, "type": "text"}
            if isinstance(part, dict) and part.get("type") in _TEXT_PARTS
            else part
            for part in content
        ]
    return {"role": "system" if role == "developer" else role, "content": content}


def _response_format(body: ResponseRequest) -> dict[str, Any] | None:
    """A chat has the fields of a schema one level deeper."""
    wanted = None if body.text is None else body.text.format
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    schema = _given(wanted)
    return {"type": schema.pop("type"), "json_schema": schema}


def _given(model: Body) -> dict[str, Any]:
    return model.model_dump(by_alias=True, exclude_none=True)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(output: RequestOutput) -> dict[str, Any]:
    counts = usage([output])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
