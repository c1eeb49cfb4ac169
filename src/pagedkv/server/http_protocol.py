"""HTTP/1.1 as uvicorn speaks it, with an end for clients that do not go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pagedkv.server.error_body import error_body


class Timer(Protocol):
    def cancel(self) -> None: ...


class Stall:
    """Cuts a connection off whose client has taken nothing for `timeout` seconds.

    Looked at while there is something for it to take. later: calls back after so many seconds.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        timeout: float,
        later: Callable[[float, Callable[[], None]], Timer],
    ) -> None:
        self._transport, self._timeout, self._later = transport, timeout, later
        self._timer: Timer | None = None
        self._left = 0  # bytes that the client had not taken when the timer was set

    def watch(self) -> None:
        """The client has something to take."""
        if self._timer is None:
            self._left = self._transport.get_write_buffer_size()
            self._timer = self._later(self._timeout, self._look)

    def stop(self) -> None:
        """It has taken enough, or is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        left = self._transport.get_write_buffer_size()
        if left == 0:
            return
        if left < self._left:
            self.watch()
        else:
            self._transport.abort()  # `close` would wait for the client to take the rest


class PatientProtocol(H11Protocol):
    """Bounds for what a client makes the server keep.

    Whatever is written waits for a client that has not taken the last 64 KiB (asyncio's high-water
    mark); one that takes nothing for `reader_timeout` seconds is cut off, and its request is
    cancelled. So is one that has sent no complete head of a request for `head_timeout` seconds, and
    one that sends more than a head's bytes of its next request before the answer to this one.
    """

    def __init__(
        self, *args: Any, reader_timeout: float, head_timeout: float, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._reader_timeout, self._head_timeout = reader_timeout, head_timeout

    # uvicorn, too, takes a narrower transport than asyncio's protocols promise.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._stall = Stall(transport, self._reader_timeout, self.loop.call_later)
        self._head: Timer | None = self.loop.call_later(self._head_timeout, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stall.stop()
        self._stop_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is not h11.MUST_CLOSE:  # else nothing can follow its last request
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self._answering():
            self._stop_head()
            self._read_on()
        elif self._head is None and not self.transport.is_closing():
            self._head = self.loop.call_later(self._head_timeout, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall.watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall.stop()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._stall.watch()

    def send_400_response(self, msg: str) -> None:
        """In OpenAI's form. A head that is too large gets 431."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer has begun, or was given before the body had come
            return
        status = 431 if self._head_too_large() else 400
        body = json.dumps(error_body(msg, "invalid_request_error")).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        events: list[Any] = [
            h11.Response(status_code=status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        for event in events:
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def _head_too_large(self) -> bool:
        data, _ = self.conn.trailing_data
        limit = self.config.h11_max_incomplete_event_size
        return limit is not None and len(data) > limit

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _read_on(self) -> None:
        """uvicorn reads nothing more once the next request has begun to come: it would not notice
        that the client has left."""
        if self.conn.their_state is h11.DONE:
            if self._head_too_large():
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def _stop_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None
