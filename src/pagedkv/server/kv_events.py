"""Cache events over ZeroMQ, for routers that read vLLM's. Needs pyzmq."""

from __future__ import annotations

import time

import zmq

from pagedkv.cache import BlockManager
from pagedkv.errors import ConfigError
from pagedkv.tiers.names import Namer
from pagedkv.transfer.events import EventStream

_SUBSCRIBED = b"\x01"


class EventPublisher:
    """Publishes what one cache does; made, and then used, by the thread that steps its core.

    endpoint: where subscribers connect to, such as tcp://127.0.0.1:5557. ConfigError: it cannot be
    bound. While nobody subscribes nothing is made; whoever comes is told of all blocks at the next
    `publish`, as is whoever else is there: that batch begins with `AllBlocksCleared`.
    """

    def __init__(self, endpoint: str, topic: str) -> None:
        self._topic = topic
        self._stream: EventStream | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSER, 1)  # every subscriber is a newcomer
        self._socket.setsockopt(zmq.LINGER, 0)
        self._subscribers = 0
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"kv_events_endpoint={endpoint!r} cannot be bound ({error}): give one that is "
                "free, such as tcp://127.0.0.1:5557"
            ) from error

    @property
    def endpoint(self) -> str:
        """Where it is bound, a port that the system chose filled in."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def follow(self, manager: BlockManager, fingerprint: bytes) -> None:
        """Which cache to tell of; workers of equal fingerprints have equal hashes."""
        self._stream = EventStream(
            manager.listen(),
            Namer(fingerprint),
            manager.block_size,
            topic=self._topic,
            short_hashes=True,  # what routers read
        )

    def publish(self) -> None:
        """Tells what has happened. Never waits: what a subscriber is too slow for is lost to it."""
        if self._stream is None:
            return
        while self._socket.poll(0):
            came = self._socket.recv().startswith(_SUBSCRIBED)
            self._subscribers += 1 if came else -1
            if came:
                self._stream.ask_for_picture()
        if self._subscribers and (frames := self._stream.poll(time.time())) is not None:
            self._socket.send_multipart(frames)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
