"""One exchange with a client: its body is read within bounds, its work ends when it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedkv.errors import PagedKVError
from pagedkv.server.error_body import error_body

# Bodies of all exchanges together, in bytes: so many of the largest.
_BODIES = 64
# What is read and thrown away of a body that is too large, so that its client gets to read why: a
# connection that is closed on unread bytes is reset, and the answer with it.
_DISCARDED = 4


class ClientGone(Exception):
    """The client has closed its connection before its body was there."""


class BodyRefused(PagedKVError):
    """A body that is not read to its end. `status`: of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ExchangeMiddleware:
    """ASGI. A handler gets a body that is complete, and is cancelled when its client is gone.

    max_body: bytes; more is answered with 413, whether by the declared length or by what has come,
    and never kept. max_head: bytes of all headers, else 431. read_timeout: seconds in which a body
    has to come, else 408. lifetime: a context in which each handler runs; what it leaves there is
    closed at its end.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_body: int,
        max_head: int,
        read_timeout: float,
        lifetime: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._app, self._lifetime = app, lifetime
        self._max_body, self._max_head, self._read_timeout = max_body, max_head, read_timeout
        self._kept = 0  # bytes of the bodies of all exchanges

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()
        try:
            self._check_head(scope)
            await self._read(scope, receive, body)
            with self._lifetime():
                await _answer(self._app, scope, bytes(body), receive, send)
        except BodyRefused as refused:
            answer = JSONResponse(
                error_body(str(refused), "invalid_request_error"),
                refused.status,
                headers={"connection": "close"},  # what follows may be the rest of the body
            )
            await answer(scope, receive, send)
        except ClientGone:
            pass
        finally:
            self._kept -= len(body)  # handlers keep a body until they have answered

    def _check_head(self, scope: Scope) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._max_head:
            raise BodyRefused(f"the headers have {size} bytes, the most is {self._max_head}", 431)

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> None:
        """Fills `body`, and counts it. BodyRefused; ClientGone."""
        headers = dict(scope["headers"])
        declared = int(headers.get(b"content-length", b"0"))  # only digits come through h11
        if declared > self._max_body and b"expect" in headers:
            raise self._too_large()  # its client waits for an answer before it sends the body
        length = 0
        try:
            async with asyncio.timeout(self._read_timeout):
                while True:
                    part, more = await _next_part(receive)
                    length += len(part)
                    if max(length, declared) <= self._max_body:
                        body += part
                        self._kept += len(part)
                        if self._kept > _BODIES * self._max_body:
                            raise BodyRefused("too many bodies are here: try again later", 503)
                    elif not more or length > _DISCARDED * self._max_body:
                        raise self._too_large()
                    if not more:
                        return
        except TimeoutError:
            raise BodyRefused(
                f"the body did not come within {self._read_timeout:g} seconds", 408
            ) from None

    def _too_large(self) -> BodyRefused:
        return BodyRefused(
            f"the body has more than {self._max_body} bytes: send less, or have the operator "
            "raise max_body_bytes",
            413,
        )


async def _next_part(receive: Receive) -> tuple[bytes, bool]:
    """And whether more follows. ClientGone."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b""), message.get("more_body", False)


async def _answer(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Runs the application until it has answered or the client is gone."""
    gone = asyncio.create_task(_until_gone(receive))
    unread = [body]
    complete = False

    async def replay() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.wait({gone})
        return {"type": "http.disconnect"}

    async def watched(message: Message) -> None:
        nonlocal complete
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        complete = complete or last  # before it is sent: after it the client may go at once
        await send(message)

    handler: asyncio.Task[None] = asyncio.create_task(_run(app, scope, replay, watched))
    try:
        await asyncio.wait({handler, gone}, return_when=asyncio.FIRST_COMPLETED)
        if complete:
            await asyncio.wait({handler})
    finally:
        for task in (handler, gone):
            task.cancel()
        await asyncio.wait({handler, gone})
    if not handler.cancelled():
        handler.result()


async def _run(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


async def _until_gone(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
