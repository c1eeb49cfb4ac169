"""Cache events over ZeroMQ: a subscriber learns all that is there, and then what changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
from served import PATIENCE, served

from pagedkv.cache import BlockManager
from pagedkv.errors import ConfigError
from pagedkv.server.kv_events import EventPublisher
from pagedkv.server.settings import ServerSettings, ServeSettings
from pagedkv.transfer.events import AllBlocksCleared, BlockStored, decode_batch


@contextmanager
def subscriber(endpoint: str, topic: str = "") -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        socket.connect(endpoint)
        yield socket


def received(socket: zmq.Socket[bytes], act: Callable[[], object]) -> tuple[bytes, int, list[Any]]:
    """The next message; `act` is repeated until there is one."""
    for _ in range(2000):
        act()
        if socket.poll(10):
            topic, seq, payload = socket.recv_multipart()
            return topic, int.from_bytes(seq), decode_batch(payload).events
    raise AssertionError("nothing came")


def remember(m: BlockManager, tokens: list[int]) -> None:
    seq = m.open()
    m.reserve([seq], [len(tokens)])
    m.commit([seq], [tokens])
    m.close(seq)


def test_each_subscriber_is_told_of_what_is_there_and_then_of_what_changes() -> None:
    m = BlockManager(16, 2)
    remember(m, [1, 2, 3, 4])
    publisher = EventPublisher("tcp://127.0.0.1:*", "kv-events")
    publisher.follow(m, b"a model")
    try:
        with subscriber(publisher.endpoint, "kv-events") as one:
            topic, seq, events = received(one, publisher.publish)
            assert (topic, seq) == (b"kv-events", 0)
            assert events[0] == AllBlocksCleared()
            assert events[1].token_ids == [1, 2, 3, 4]
            assert all(isinstance(name, int) for name in events[1].block_hashes)
            remember(m, [5, 6])
            _, seq, (event,) = received(one, publisher.publish)
            assert (seq, event.token_ids) == (1, [5, 6])
            with subscriber(publisher.endpoint) as two:
                for socket in (two, one):
                    _, seq, events = received(socket, publisher.publish)
                    assert (seq, len(events)) == (2, 3)
    finally:
        publisher.close()


def test_an_endpoint_that_is_taken_is_refused_by_name() -> None:
    first = EventPublisher("tcp://127.0.0.1:*", "")
    with pytest.raises(ConfigError, match=r"kv_events_endpoint='tcp://127\.0\.0\.1:"):
        EventPublisher(first.endpoint, "")
    first.close()


def test_endpoints_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="'http://h:1' must be an address of ZeroMQ"):
        ServerSettings(kv_events_endpoint="http://h:1")
    in_a_thread = ServerSettings(kv_events_endpoint="tcp://h:1", engine_process=False)
    with pytest.raises(ValueError, match="kv_events_endpoint='tcp://h:1' needs engine_process"):
        ServeSettings(server=in_a_thread)


def test_a_server_publishes_what_its_engine_caches(model: Path, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    with served(model, "--kv-events-endpoint", endpoint) as server:
        asked = {"model": str(model), "prompt": "a b c d " * 10, "max_tokens": 2}
        url = f"{server.url}/v1/completions"
        with subscriber(endpoint) as socket:
            _, _, (first, *stored) = received(
                socket, lambda: httpx.post(url, json=asked, timeout=PATIENCE)
            )
    assert first == AllBlocksCleared()
    assert any(isinstance(event, BlockStored) for event in stored)
