"""Counting the answers of the application."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ResponseCounter:
    """ASGI, around the application: tells `count` the status of every HTTP answer.

    500 where the application raises before it has answered.
    """

    def __init__(self, app: ASGIApp, count: Callable[[int], None]) -> None:
        self._app, self._count = app, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answered = False

        async def watched(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                self._count(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            if not answered:
                self._count(500)
            raise
