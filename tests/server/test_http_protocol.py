"""Clients that do not go on: they are cut off, and what they asked for with them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable

import httpx
import pytest
from fastapi import FastAPI
from serving import GatedExecutor, http_server, settings, toy_core
from tiny_llm import VOCAB

from pagedkv.engine.toy import ToyExecutor
from pagedkv.server.app import create_app
from pagedkv.server.async_engine import AsyncEngine
from pagedkv.server.http_protocol import Stall

PATIENCE = 60.0


class Transport(asyncio.Transport):
    def __init__(self, buffered: int) -> None:
        self.buffered, self.aborted = buffered, False

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def abort(self) -> None:
        self.aborted = True


class Later:
    """`call_later` of a loop in which time passes when the test says so."""

    def __init__(self) -> None:
        self.set: list[Callable[[], None]] = []

    def __call__(self, seconds: float, call: Callable[[], None]) -> Later:
        assert seconds == 30.0
        self.set.append(call)
        return self

    def cancel(self) -> None:
        self.set.clear()

    def fire(self) -> None:
        self.set.pop()()


def test_who_takes_nothing_is_cut_off_and_who_is_slow_is_not() -> None:
    transport, later = Transport(100), Later()
    stall = Stall(transport, 30.0, later)
    stall.watch()
    stall.watch()
    assert len(later.set) == 1
    for left in (99, 50, 1):
        transport.buffered = left
        later.fire()
        assert not transport.aborted and len(later.set) == 1
    later.fire()
    assert transport.aborted and not later.set


def test_who_has_taken_all_is_left_alone() -> None:
    transport, later = Transport(100), Later()
    stall = Stall(transport, 30.0, later)
    stall.watch()
    transport.buffered = 0
    later.fire()
    assert not transport.aborted and not later.set
    stall.watch()
    stall.stop()
    assert not later.set


def request(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def connect(url: str) -> socket.socket:
    """A client whose kernel keeps little of what it does not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(PATIENCE)
    client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    return client


def test_a_reader_that_stops_is_cut_off_and_delays_nobody() -> None:
    executor = GatedExecutor(ToyExecutor(2048, 4, vocab_size=VOCAB))
    core = toy_core(2048, max_model_len=4096, executor=executor)
    engines: list[AsyncEngine] = []

    def make_app(engine: AsyncEngine) -> FastAPI:
        engines.append(engine)
        return create_app(engine, settings())

    given = settings(reader_timeout=0.2).server
    with (
        http_server(lambda: core, make_app, given=given, send_buffer=4096) as url,
        connect(url) as stopped,
    ):
        # 600 chunks of some hundred bytes, more than is kept for anybody; then no step ends.
        executor.allow(600)
        many = {"prompt": "a", "max_tokens": 4000, "stream": True, "logprobs": 5}
        stopped.sendall(request(many))
        for live in (1, 0):
            asyncio.run(asyncio.wait_for(num_live(engines[0], live), PATIENCE))
        executor.allow(None)
        asked = {"prompt": "b", "max_tokens": 50, "stream": True}
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=PATIENCE)
        assert answer.text.endswith("data: [DONE]\n\n")
        assert len(core.scheduler) == 0


def test_others_go_on_beside_a_reader_that_stops() -> None:
    core = toy_core(2048, max_model_len=4096, executor=ToyExecutor(2048, 4, vocab_size=VOCAB))
    with http_server(lambda: core, send_buffer=4096) as url, connect(url) as stopped:
        many = {"prompt": "a", "max_tokens": 4000, "stream": True, "logprobs": 5}
        stopped.sendall(request(many))
        assert stopped.recv(1) == b"H"
        asked = {"prompt": "b", "max_tokens": 200, "stream": True}
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=PATIENCE)
        assert answer.text.endswith("data: [DONE]\n\n")


async def num_live(engine: AsyncEngine, requests: int) -> None:
    while engine.num_live != requests:
        await asyncio.sleep(0)


def test_a_head_that_does_not_come_is_not_waited_for() -> None:
    given = settings(reader_timeout=0.05).server
    with http_server(given=given) as url, connect(url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost:")
        assert client.recv(1) == b""


def test_a_head_that_is_too_large_or_none_is_refused_in_openais_form() -> None:
    for head, status in (
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 2000, 431),
        (b"nonsense\r\n\r\n", 400),
    ):
        given = settings(max_header_bytes=1000).server
        with http_server(given=given) as url, connect(url) as client:
            client.sendall(head)
            answer = b""
            while part := client.recv(4096):
                answer += part
        top, _, body = answer.partition(b"\r\n\r\n")
        assert top.startswith(b"HTTP/1.1 %d " % status)
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


def rest(client: socket.socket) -> bytes:
    answer = b""
    while part := client.recv(4096):
        answer += part
    return answer


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("ahead", [20, 4096])
def test_a_client_that_leaves_is_noticed_though_it_has_sent_more(
    ahead: int, together: bool
) -> None:
    executor = GatedExecutor(ToyExecutor(64, 4, vocab_size=VOCAB))
    core = toy_core(executor=executor)
    engines: list[AsyncEngine] = []

    def make_app(engine: AsyncEngine) -> FastAPI:
        engines.append(engine)
        return create_app(engine, settings())

    given = settings(max_header_bytes=4096).server
    with http_server(lambda: core, make_app, given=given) as url:
        with connect(url) as client:
            more = b"GET /health HTTP/1.1\r\nX: ".ljust(ahead, b"x")
            asked = request({"prompt": "a", "max_tokens": 50})
            client.sendall(asked + more if together else asked)
            asyncio.run(asyncio.wait_for(num_live(engines[0], 1), PATIENCE))
            if not together:
                client.sendall(more)
        asyncio.run(asyncio.wait_for(num_live(engines[0], 0), PATIENCE))
        executor.allow(None)


def test_requests_that_come_ahead_are_answered_in_order_and_too_much_is_cut_off() -> None:
    given = settings(max_header_bytes=1000).server
    asked = request({"prompt": "a", "max_tokens": 2})
    with http_server(given=given) as url:
        with connect(url) as client:
            last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            client.sendall(asked * 3 + last)
            answers = rest(client)
        assert answers.count(b"HTTP/1.1 200") == 4 and answers.endswith(b'{"status":"ok"}')
        with connect(url) as client:
            client.sendall(asked + b"GET /health HTTP/1.1\r\nX: ".ljust(2000, b"x"))
            assert client.recv(1) == b""


def test_what_follows_a_last_request_or_an_early_answer_is_not_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = GatedExecutor(ToyExecutor(64, 4, vocab_size=VOCAB))
    asked = request({"prompt": "a", "max_tokens": 2})
    with http_server(lambda: toy_core(executor=executor)) as url, connect(url) as client:
        client.sendall(asked.replace(b"Host: x", b"Host: x\r\nConnection: close"))
        assert executor.reached.acquire(timeout=PATIENCE)
        client.sendall(b"\r\n")
        executor.allow(None)
        assert rest(client).startswith(b"HTTP/1.1 200")
    keyed = settings({"key": "tenant"})
    with (
        http_server(make_app=lambda engine: create_app(engine, keyed)) as url,
        connect(url) as client,
    ):
        client.sendall(b"POST /v1/models HTTP/1.1\r\nTransfer-Encoding: chunked\r\nHost: x\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 401")
        client.sendall(b"no chunk\r\n")
        rest(client)
    assert not [line for line in caplog.messages if "Fatal" in line]
