"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field, WithJsonSchema

from pagedkv.engine.output import CompletionOutput, RequestOutput
from pagedkv.engine.requests import Prepared, PromptDict, RequestReader
from pagedkv.errors import RequestError
from pagedkv.scheduling.params import MAX_LOGPROBS
from pagedkv.server.openai.answers import Sent
from pagedkv.server.openai.api import Api, Call, answer
from pagedkv.server.openai.errors import FieldError
from pagedkv.server.openai.limits import check_limits
from pagedkv.server.openai.parameters import Params, most_tokens, prepare, sampling
from pagedkv.server.openai.protocol import (
    Generation,
    Refused,
    described,
    read_body,
)
from pagedkv.server.openai.words import Scores

_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}


class CompletionRequest(Generation):
    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None
    suffix: Refused = None
    prompt_embeds: Refused = None


class CompletionForm:
    """A choice is text. scores: None where no log-probabilities are wanted; echoes: the text to
    begin with, of each prompt; n: samples of each."""

    object = chunk_object = "text_completion"

    def __init__(
        self, body: CompletionRequest, scores: Scores, n: int, echoes: Sequence[str] | None
    ) -> None:
        self._body, self._scores, self._n, self._echoes = body, scores, n, echoes

    def choice(self, index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        (choice,) = self.pieces(index, output, sample, Sent())
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._scores.prompt(output.prompt_logprobs)
        return choice

    def pieces(
        self, index: int, output: RequestOutput, sample: CompletionOutput, sent: Sent
    ) -> Iterable[dict[str, Any]]:
        text, first = sample.text[sent.chars :], not sent.begun
        echoes = first and self._echoes is not None and bool(sample.token_ids or sample.finished)
        if not (text or echoes or sample.finished):
            return ()
        if echoes and self._echoes is not None:
            text = self._echoes[index // self._n] + text
        choice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(output, sample, sent, echoes),
            "finish_reason": sample.finish_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = sample.token_ids[sent.tokens :]
            if first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        if sample.finished:
            choice["stop_reason"] = sample.stop_reason
            if sample.error is not None:
                choice["error"] = sample.error
        sent.begun = True
        sent.chars, sent.tokens = len(sample.text), len(sample.token_ids)
        return (choice,)

    def _logprobs(
        self, output: RequestOutput, sample: CompletionOutput, sent: Sent, echoes: bool
    ) -> dict[str, Any] | None:
        """Of the tokens that have not been sent, those of the prompt before them if it `echoes`."""
        if sample.logprobs is None:
            return None
        tokens: Sequence[int] = sample.token_ids[sent.tokens :]
        entries: Sequence[Any] = sample.logprobs[sent.tokens :]
        if echoes and output.prompt_logprobs is not None:
            tokens = (*output.prompt_token_ids, *tokens)
            entries = (*output.prompt_logprobs, *entries)
        return self._scores.completion(tokens, entries, sent.offsets)

    def extras(self, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
        return {}


def router(api: Api) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", openapi_extra=described(CompletionRequest))
    async def completions(request: Request) -> Response:
        arrival = api.engine.clock()
        body = await read_body(request, CompletionRequest)
        call, prompts = await Call.of(request, arrival, body), _prompts(body)
        check_limits(api.settings.server, body, len(prompts), logprobs=body.logprobs)
        params = _params(body)
        return await answer(
            api,
            call,
            body,
            "cmpl",
            lambda: _read(api, call, body, params, prompts),
            num_prompts=len(prompts),
            num_ids=sum(len(prompt) for prompt in prompts if isinstance(prompt, list)),
            silent=_silent(body),
        )

    return routes


def _silent(body: CompletionRequest) -> bool:
    """The prompt alone is wanted. The engine draws a token that is not shown."""
    return body.max_tokens == 0 and bool(body.echo)


def _params(body: CompletionRequest) -> Params:
    """FieldError, RequestError: a field is wrong, or does not go with another."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise FieldError("best_of other than n is not implemented: leave it out", "best_of")
    if body.stream and body.prompt_logprobs is not None:
        raise FieldError("prompt_logprobs are not streamed: leave out stream", "prompt_logprobs")
    most = 16 if body.max_tokens is None else 1 if _silent(body) else body.max_tokens
    scored = body.logprobs if body.echo else None
    if scored is not None and body.prompt_logprobs is not None:
        scored = max(scored, body.prompt_logprobs)
    return sampling(body, most, body.logprobs, scored)


def _read(
    api: Api, call: Call, body: CompletionRequest, params: Params, prompts: Sequence[Any]
) -> tuple[list[Prepared], CompletionForm]:
    reader = api.engine.front.reader
    prepared, most = [], most_tokens(body, api.engine.facts.config.max_model_len)
    for i, prompt in enumerate(prompts):
        try:
            prepared.append(
                prepare(
                    reader,
                    api.engine.new_id(f"cmpl-{call.id}"),
                    _with_ids(reader, prompt, body.add_special_tokens is not False, most),
                    params,
                    body,
                    max_model_len=api.engine.facts.config.max_model_len,
                    arrival=call.arrival,
                    tenant=call.tenant,
                    slo=api.settings.slo_of(call.tenant),
                    timeout=api.settings.server.request_timeout,
                )
            )
        except RequestError as error:
            if len(prompts) == 1:
                raise
            raise RequestError(f"prompt {i}: {error}") from error
    echoes = None
    if body.echo:
        echoes = [r.prompt or reader.decode(r.add.prompt) for r in prepared]
    scores = Scores(api.words, as_ids=bool(body.return_tokens_as_token_ids), top=body.logprobs or 0)
    return prepared, CompletionForm(body, scores, body.n or 1, echoes)


def _prompts(body: CompletionRequest) -> list[Any]:
    """Each of them text or token ids; they are not looked at yet."""
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt
    return [prompt]


def _with_ids(reader: RequestReader, prompt: object, special: bool, most: int | None) -> PromptDict:
    """FieldError, RequestError: the prompt is empty, or neither text nor token ids."""
    if isinstance(prompt, str):
        text, ids = reader.tokens(prompt, special=special, most=most)
        return {"prompt": prompt if text is None else text, "prompt_token_ids": ids}
    if isinstance(prompt, list) and prompt:
        return {"prompt_token_ids": prompt}
    raise FieldError("a prompt is text or a list of token ids, and not empty", "prompt")
