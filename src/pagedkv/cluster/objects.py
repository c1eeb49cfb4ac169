"""K/V between workers through Ray's object store: between hosts, or zero copy on one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray

from pagedkv.transfer.messages import Data, MoveId, unpack
from pagedkv.transfer.payload import UInt8

# Objects of others that are kept until they are read; what is read later is asked for again.
_KEPT = 256
# Seconds that an object may take to get here.
_PATIENCE = 5.0


class ObjectTransport:
    """An `engine.transports.Transport`. References go with the frames, as Ray wants it.

    worker: its name. `expect` belongs to the actor's thread, all else to the core's.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._number = 0
        self._sent: dict[MoveId, list[tuple[int, Any]]] = {}
        self._new: dict[bytes, Any] = {}
        self._expected: OrderedDict[bytes, Any] = OrderedDict()

    def put(self, move: MoveId, number: int, blocks: UInt8) -> bytes:
        self._number += 1
        name, object_ref = f"{self._worker} {self._number}".encode(), ray.put(blocks.reshape(-1))
        self._sent.setdefault(move, []).append((number, object_ref))
        self._new[name] = object_ref
        return name

    def named_in(self, frame: bytes) -> dict[bytes, Any]:
        """The object that a frame of this worker names, to go with it."""
        message = unpack(frame) if self._new else None
        name = message.payload if isinstance(message, Data) else b""
        return {name: self._new.pop(name)} if name in self._new else {}

    def expect(self, objects: Mapping[bytes, Any]) -> None:
        """What the next frames refer to."""
        self._expected.update(objects)
        while len(self._expected) > _KEPT:
            self._expected.popitem(last=False)

    def get(self, reference: bytes) -> UInt8 | None:
        object_ref = self._expected.pop(reference, None)
        if object_ref is None:
            return None
        try:
            found: UInt8 = np.asarray(ray.get(object_ref, timeout=_PATIENCE))
        except ray.exceptions.RayError:  # its owner is gone
            return None
        return found

    def is_intact(self) -> bool:
        return True  # objects are never written again

    def free(self, move: MoveId, number: int) -> None:
        kept = [sent for sent in self._sent.pop(move, ()) if sent[0] > number]
        if kept:
            self._sent[move] = kept

    def close(self) -> None:
        self._sent.clear()
        self._expected.clear()
