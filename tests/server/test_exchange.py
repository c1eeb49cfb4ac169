"""Bodies within bounds, and handlers that end when their client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from serving import MODEL, http_server, settings
from starlette.types import Message, Receive, Scope, Send

from pagedkv.server.app import create_app
from pagedkv.server.exchange import ExchangeMiddleware

MIB = 2**20


class Client:
    """One exchange with an ASGI application, message by message."""

    def __init__(self, *bodies: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self.scope: Scope = {"type": "http", "path": "/", "headers": headers or []}
        self.sent: list[Message] = []
        self.gone = asyncio.Event()
        self._bodies = list(bodies)

    async def receive(self) -> Message:
        if self._bodies:
            body = self._bodies.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(self._bodies)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    assert not message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"], "more_body": False})


@contextmanager
def no_lifetime() -> Iterator[None]:
    yield


def exchange(app: Any, lifetime: Any = no_lifetime, read_timeout: float = 60.0) -> Any:
    return ExchangeMiddleware(app, 10, 100, read_timeout, lifetime)


def test_a_body_is_handed_over_whole() -> None:
    async def main() -> None:
        client = Client(b"01234", b"56789")
        await exchange(echo)(client.scope, client.receive, client.send)
        assert client.sent[1]["body"] == b"0123456789"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("bodies", "headers", "status"),
    [
        ([b"0" * 11], [], 413),
        ([b"01234"] * 3, [], 413),  # chunked: counted while it is read
        ([b"0"] * 1000, [], 413),  # never comes to an end: it is read so far and no further
        ([b"0" * 11], [(b"content-length", b"11")], 413),
        ([], [(b"content-length", b"11"), (b"expect", b"100-continue")], 413),
        ([b"0"], [(b"x", b"0" * 100)], 431),
    ],
)
def test_what_is_too_large_is_refused(bodies: list[bytes], headers: Any, status: int) -> None:
    async def main() -> None:
        client = Client(*bodies, headers=headers)
        await exchange(echo)(client.scope, client.receive, client.send)
        assert client.status == status
        assert (b"connection", b"close") in client.sent[0]["headers"]

    asyncio.run(main())


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def main() -> None:
        client = Client()
        await exchange(echo, read_timeout=0.0)(client.scope, client.receive, client.send)
        assert client.status == 408

    asyncio.run(main())


class Unfinished(Client):
    """Sends a part of its body, and then nothing."""

    def __init__(self, part: bytes) -> None:
        super().__init__()
        self._parts = [part]

    async def receive(self) -> Message:
        if self._parts:
            return {"type": "http.request", "body": self._parts.pop(), "more_body": True}
        return await super().receive()


def test_all_bodies_together_have_a_bound() -> None:
    async def main() -> None:
        app = exchange(echo)
        slow = [Unfinished(b"0" * 10) for _ in range(64)]
        tasks = [asyncio.create_task(app(c.scope, c.receive, c.send)) for c in slow]
        await asyncio.sleep(0)  # each of them has come to its wait
        for status in (503, 200):
            client = Client(b"0" * 5)
            await app(client.scope, client.receive, client.send)
            assert client.status == status
            slow.pop().gone.set()
            await tasks.pop()
        for client in slow:
            client.gone.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())


@pytest.mark.parametrize("streaming", [False, True])
def test_a_handler_is_cancelled_when_its_client_goes(streaming: bool) -> None:
    async def main() -> None:
        reached, ends = asyncio.Event(), []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            if streaming:
                await send({"type": "http.response.start", "status": 200, "headers": []})
            reached.set()
            try:
                await asyncio.Event().wait()
            finally:
                ends.append("cancelled")

        @contextmanager
        def lifetime() -> Iterator[None]:
            yield
            ends.append("closed")

        client = Client(b"")
        middleware = exchange(app, lifetime)
        task = asyncio.create_task(middleware(client.scope, client.receive, client.send))
        await reached.wait()
        client.gone.set()
        await task
        assert ends == ["cancelled", "closed"]

    asyncio.run(main())


def test_what_a_handler_raises_is_passed_on() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("broken")

    async def main() -> None:
        client = Client(b"")
        with pytest.raises(ValueError, match="broken"):
            await exchange(broken)(client.scope, client.receive, client.send)

    asyncio.run(main())


def test_a_handler_may_finish_after_its_answer() -> None:
    async def main() -> None:
        done = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await echo(scope, receive, send)
            for _ in range(5):
                await asyncio.sleep(0)
            done.append(True)

        client = Client(b"")
        client.gone.set()  # as soon as the body is there
        await exchange(app)(client.scope, client.receive, client.send)
        assert done or not client.sent

    asyncio.run(main())


def test_large_bodies_and_heads_get_an_answer() -> None:
    body = b'{"prompt": "' + b"a" * (5 * MIB) + b'"}'
    kind = {"content-type": "application/json"}
    with http_server() as url, httpx.Client(base_url=url, timeout=60) as client:
        path = "/v1/completions"
        assert client.post(path, content=body, headers=kind).status_code == 413
        chunked = (body[i : i + MIB] for i in range(0, len(body), MIB))
        answer = client.post(path, content=chunked, headers=kind)
        assert answer.status_code == 413
        assert "max_body_bytes" in answer.json()["error"]["message"]
        assert client.post(path, json={}, headers={"x": "a" * 70_000}).status_code in (400, 431)
        asked = {"model": MODEL, "prompt": "a", "max_tokens": 2}
        assert client.post(path, json=asked).status_code == 200


def test_bounds_are_the_settings() -> None:
    def make_app(engine: Any) -> Any:
        return create_app(engine, settings(max_body_bytes=100))

    with http_server(make_app=make_app) as url:
        asked = {"model": MODEL, "prompt": "a" * 100, "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=asked).status_code == 413
