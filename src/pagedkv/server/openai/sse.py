"""Answers that come in pieces."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pagedkv.server.openai.answers import Answer


class EventStream(StreamingResponse):
    """Server-sent events of an answer, which is closed however this ends, begun or not."""

    def __init__(self, answer: Answer, headers: Mapping[str, str]) -> None:
        self._answer, self._events = answer, answer.events()
        super().__init__(
            self._events,
            headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            media_type="text/event-stream",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()
