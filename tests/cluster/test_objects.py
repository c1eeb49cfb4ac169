"""K/V through an object store that is a dictionary here."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from pagedkv.cluster import objects
from pagedkv.cluster.objects import ObjectTransport
from pagedkv.transfer.messages import Data, Hold, MoveId, pack
from pagedkv.transfer.payload import UInt8

BLOCKS = np.arange(64, dtype=np.uint8).reshape(2, 32)


def put(value: UInt8) -> SimpleNamespace:
    """A reference to a value, as Ray's has a name of its own."""
    return SimpleNamespace(value=value, binary=lambda: str(id(value)).encode())


def test_each_frame_takes_the_object_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two moves at once go to two workers: a frame of one must not take the other's object."""
    monkeypatch.setattr(objects, "ray", SimpleNamespace(put=put))
    sender, receivers = ObjectTransport(), {to: ObjectTransport() for to in "de"}
    frames = {}
    for to, request in (("d", "a"), ("e", "b")):
        move = MoveId(request, 1)
        name = sender.put(move, 1, BLOCKS if to == "d" else BLOCKS[::-1])
        frames[to] = name, pack(Data(*move, 1, 1, 0, 2, bytes(8), "float32", (), name))
    assert sender.named_in(pack(Hold("a", 1, lease=1))) is None
    for to, (name, frame) in reversed(frames.items()):
        found = sender.named_in(frame)
        assert found is not None and found.name == name
        receivers[to].expect(name, found.object_ref.value)
    for to, expected in (("d", BLOCKS), ("e", BLOCKS[::-1])):
        got = receivers[to].get(frames[to][0])
        assert got is not None and got.tobytes() == expected.tobytes()
    assert sender.named_in(frames["d"][1]) is None


def test_what_is_never_read_takes_no_room_for_long() -> None:
    """A move that has ended leaves what still came for it; the next one needs the room."""
    transport, payload = ObjectTransport(most=100), np.zeros(40, np.uint8)
    for name in (b"1", b"2", b"3"):
        transport.expect(name, payload)
    assert transport.num_waiting_bytes == 80  # there was no room for the third
    transport.expect(b"4", None)  # it did not get here
    assert transport.get(b"3") is None and transport.num_waiting_bytes == 0
    assert transport.get(b"1") is None  # the core comes to frames in order
    transport.expect(b"5", payload)
    assert transport.get(b"4") is None
    assert transport.get(b"5") is payload and transport.num_waiting_bytes == 0
    transport.expect(b"6", payload)
    transport.close()
    assert transport.num_waiting_bytes == 0 and transport.get(b"6") is None
