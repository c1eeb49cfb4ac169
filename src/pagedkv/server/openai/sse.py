"""Answers that come in pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class EventStream(StreamingResponse):
    """Server-sent events; `close` is called however this ends, begun or not."""

    def __init__(
        self, events: AsyncIterator[bytes], close: Callable[[], None], headers: Mapping[str, str]
    ) -> None:
        self._close = close
        super().__init__(
            events,
            headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            media_type="text/event-stream",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
