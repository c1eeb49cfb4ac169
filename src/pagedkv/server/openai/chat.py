"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Request, Response
from pydantic import Field

from pagedkv.engine.output import CompletionOutput, RequestOutput
from pagedkv.engine.requests import Prepared, PromptDict, RequestReader
from pagedkv.scheduling.params import MAX_LOGPROBS, SamplingParams
from pagedkv.server.openai.answers import Sent
from pagedkv.server.openai.api import Api, Call, answer
from pagedkv.server.openai.errors import FieldError
from pagedkv.server.openai.limits import check_limits
from pagedkv.server.openai.parameters import Params, most_tokens, prepare, sampling
from pagedkv.server.openai.protocol import Generation, Refused, Whole, described, read_body
from pagedkv.server.openai.tools import (
    ToolCall,
    ToolChoice,
    Tools,
    ToolUse,
    chat_messages,
    new_calls,
    tool_use,
)
from pagedkv.server.openai.words import Scores

Messages = Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]


class ChatRequest(Generation):
    messages: Messages
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Accepted: they change nothing for models that know nothing of them.
    reasoning_effort: Any = None
    verbosity: Any = None
    prediction: Any = None
    # Not implemented.
    functions: Refused = None
    function_call: Refused = None
    modalities: Refused = None
    audio: Refused = None
    web_search_options: Refused = None
    chat_template: Refused = None
    documents: Refused = None


class ChatForm:
    """A choice is a message of the assistant."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatRequest, scores: Scores, tools: ToolUse | None = None) -> None:
        self._body, self._scores, self._tools = body, scores, tools

    def choice(self, index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": sample.text, "refusal": None}
        rest = self._rest(sample, 0)
        if self._tools is not None:
            message |= self._tools.message(sample.text)
            calls = message.get("tool_calls", ())
            rest["finish_reason"] = self._tools.reason(sample.finish_reason, calls)
        return {"index": index, "message": message, **rest}

    def pieces(
        self, index: int, output: RequestOutput, sample: CompletionOutput, sent: Sent
    ) -> Iterable[dict[str, Any]]:
        if not sent.begun and (sample.token_ids or sample.finished):
            sent.begun = True
            delta = {"role": "assistant", "content": ""}
            yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        text, calls = sample.text, list[ToolCall]()
        if self._tools is not None:
            text, calls = self._tools.read(text, sample.finished)
        new: dict[str, Any] = {"content": text[sent.chars :]} if text[sent.chars :] else {}
        if written := new_calls(calls, sent.calls):
            new["tool_calls"] = written
        if new or sample.finished:
            rest = self._rest(sample, sent.tokens)
            if self._tools is not None:
                rest["finish_reason"] = self._tools.reason(sample.finish_reason, calls)
            yield {"index": index, "delta": new, **rest}
            sent.chars, sent.tokens = len(text), len(sample.token_ids)

    def _rest(self, sample: CompletionOutput, begin: int) -> dict[str, Any]:
        """Beside the text: of the tokens from `begin` on."""
        rest: dict[str, Any] = {"logprobs": None, "finish_reason": sample.finish_reason}
        if sample.logprobs is not None:
            tokens = sample.token_ids[begin:]
            rest["logprobs"] = self._scores.chat(tokens, sample.logprobs[begin:])
        if self._body.return_token_ids:
            rest["token_ids"] = sample.token_ids[begin:]
        if sample.finished:
            rest["stop_reason"] = sample.stop_reason
            if sample.error is not None:
                rest["error"] = sample.error
        return rest

    def extras(self, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
        output, extras = outputs[0], dict[str, Any]()
        if output.prompt_logprobs is not None:
            extras["prompt_logprobs"] = self._scores.prompt(output.prompt_logprobs)
        if self._body.return_token_ids:
            extras["prompt_token_ids"] = output.prompt_token_ids
        return extras


def router(api: Api) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=described(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        arrival = api.engine.clock()
        body = await read_body(request, ChatRequest)
        call = await Call.of(request, arrival, body)
        check_limits(api.settings.server, body, top_logprobs=body.top_logprobs)
        tools = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
        params = chat_params(body, tools)
        return await answer(
            api, call, body, "chatcmpl", lambda: read_chat(api, call, body, params, tools)
        )

    return routes


def chat_params(body: ChatRequest, tools: ToolUse | None) -> Params:
    """FieldError, RequestError: a field is wrong, or does not go with another."""
    if body.top_logprobs is not None and not body.logprobs:
        raise FieldError("top_logprobs needs logprobs=true", "top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise FieldError("prompt_logprobs are not streamed: leave out stream", "prompt_logprobs")
    most = body.max_completion_tokens
    if most is None:
        most = body.max_tokens
    params = sampling(body, most, (body.top_logprobs or 0) if body.logprobs else None)
    form = None if tools is None else tools.form
    if form is None:
        return params
    if not isinstance(params, SamplingParams):
        raise FieldError("tool_choice does not go with use_beam_search", "tool_choice")
    if params.structured_outputs is not None:
        raise FieldError(
            "tool_choice demands calls, and response_format another form: leave one out",
            "response_format",
        )
    return replace(params, structured_outputs=form)


def read_chat(
    api: Api, call: Call, body: ChatRequest, params: Params, tools: ToolUse | None
) -> tuple[list[Prepared], ChatForm]:
    """The request, tokenised. RequestError: the template refuses it, or it can never run."""
    reader = api.engine.front.reader
    prompt = chat_prompt(
        reader,
        chat_messages(body.messages, tools, reader.template_has_tools),
        body,
        tools=None if tools is None else tools.schemas,
        most=most_tokens(body, api.engine.facts.config.max_model_len),
    )
    prepared = prepare(
        reader,
        api.engine.new_id(f"chatcmpl-{call.id}"),
        prompt,
        params,
        body,
        max_model_len=api.engine.facts.config.max_model_len,
        arrival=call.arrival,
        tenant=call.tenant,
        slo=api.settings.slo_of(call.tenant),
        timeout=api.settings.server.request_timeout,
    )
    as_ids = bool(body.return_tokens_as_token_ids)
    scores = Scores(api.words, as_ids=as_ids, top=body.top_logprobs or 0)
    return [prepared], ChatForm(body, scores, tools)


class Templated(Protocol):
    """Fields that say what a chat template makes of messages."""

    add_special_tokens: bool | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


def chat_prompt(
    reader: RequestReader,
    messages: Sequence[Mapping[str, Any]],
    body: Templated,
    *,
    tools: list[dict[str, Any]] | None = None,
    most: int | None = None,
) -> PromptDict:
    """The prompt that messages become. FieldError, RequestError."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise FieldError(
            "continue_final_message does not go with add_generation_prompt",
            "continue_final_message",
        )
    return reader.chat(
        messages,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        template_arguments=body.chat_template_kwargs,
        special=bool(body.add_special_tokens),
        most=most,
    )
