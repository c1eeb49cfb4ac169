"""K/V through an object store that is a dictionary here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagedkv.cluster import objects
from pagedkv.cluster.objects import ObjectTransport
from pagedkv.transfer.messages import Data, Hold, MoveId, pack

BLOCKS = np.arange(64, dtype=np.uint8).reshape(2, 32)


def test_each_frame_takes_the_object_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two moves at once go to two workers: a frame of one must not take the other's object."""
    ray = SimpleNamespace(put=lambda value: [value], get=lambda ref, timeout: ref[0])
    monkeypatch.setattr(objects, "ray", ray)
    sender, receivers = ObjectTransport("p"), {to: ObjectTransport(to) for to in "de"}
    frames = {}
    for to, request in (("d", "a"), ("e", "b")):
        move = MoveId(request, 1)
        name = sender.put(move, 1, BLOCKS if to == "d" else BLOCKS[::-1])
        frames[to] = name, pack(Data(*move, 1, 1, 0, 2, bytes(8), "float32", (), name))
    assert sender.named_in(pack(Hold("a", 1, lease=1))) == {}
    for to, (name, frame) in reversed(frames.items()):
        found: dict[bytes, Any] = sender.named_in(frame)
        assert list(found) == [name]
        receivers[to].expect(found)
    for to, expected in (("d", BLOCKS), ("e", BLOCKS[::-1])):
        got = receivers[to].get(frames[to][0])
        assert got is not None and got.tobytes() == expected.tobytes()
    assert sender.named_in(frames["d"][1]) == {}
