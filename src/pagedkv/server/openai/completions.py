"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict

from pagedkv.errors import RequestError
from pagedkv.scheduling.params import SamplingParams
from pagedkv.server.async_engine import AsyncEngine, Stream


class CompletionRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str
    prompt: str
    max_tokens: int = 16
    temperature: float = 1.0
    stream: bool = False


def router(engine: AsyncEngine, models: tuple[str, ...]) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest) -> Any:
        if body.model not in models:
            raise RequestError(f"the model {body.model!r} is not served: there is {models[0]!r}")
        params = SamplingParams(max_tokens=body.max_tokens, temperature=body.temperature)
        request_id = engine.new_id("cmpl")
        prepared = await asyncio.to_thread(
            engine.front.reader.read, request_id, body.prompt, params, arrival=engine.clock()
        )
        stream = engine.submit(prepared)
        created = int(time.time())
        if body.stream:
            events = _events(engine, stream, body.model, created)
            return StreamingResponse(events, media_type="text/event-stream")
        async for output in stream:
            newest = output
        sample = newest.outputs[0]
        choice = {"index": 0, "text": sample.text, "finish_reason": sample.finish_reason}
        return {
            "id": request_id,
            "object": "text_completion",
            "created": created,
            "model": body.model,
            "choices": [choice],
        }

    return routes


async def _events(
    engine: AsyncEngine, stream: Stream, model: str, created: int
) -> AsyncIterator[str]:
    sent = 0
    try:
        async for output in stream:
            sample = output.outputs[0]
            choice = {
                "index": 0,
                "text": sample.text[sent:],
                "finish_reason": sample.finish_reason,
            }
            sent = len(sample.text)
            chunk = {
                "id": stream.request_id,
                "object": "text_completion",
                "created": created,
                "model": model,
                "choices": [choice],
            }
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"
    finally:
        engine.cancel(stream)
