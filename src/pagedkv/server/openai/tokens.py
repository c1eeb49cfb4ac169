"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from pagedkv.errors import RequestError
from pagedkv.server.openai.api import Api, json_response
from pagedkv.server.openai.body import Body
from pagedkv.server.openai.chat import Messages, chat_prompt
from pagedkv.server.openai.protocol import Tokens, described, read_body


class TokenizeRequest(Body):
    """`prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Tokens


def router(api: Api) -> APIRouter:
    routes = APIRouter()

    @routes.post("/tokenize", openapi_extra=described(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeRequest)
        api.model(body.model)
        num_bytes = len(await request.body())
        return json_response(await api.in_thread(num_bytes, lambda: _tokenized(api, body)))

    @routes.post("/detokenize", openapi_extra=described(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest)
        api.model(body.model)
        num_bytes, reader = len(await request.body()), api.engine.front.reader
        text = await api.in_thread(num_bytes, lambda: reader.decode(body.tokens))
        return json_response({"prompt": text})

    return routes


def _tokenized(api: Api, body: TokenizeRequest) -> dict[str, Any]:
    ids = _ids(api, body)
    return {
        "count": len(ids),
        "max_model_len": api.engine.facts.config.max_model_len,
        "tokens": ids,
        "token_strs": [api.words[i][0] for i in ids] if body.return_token_strs else None,
    }


def _ids(api: Api, body: TokenizeRequest) -> tuple[int, ...]:
    reader = api.engine.front.reader
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages")
    if body.prompt is not None:
        return reader.encode(body.prompt, special=body.add_special_tokens is not False)
    return tuple(chat_prompt(reader, body.messages or [], body)["prompt_token_ids"])
