"""K/V between workers through Ray's object store: between hosts, or zero copy on one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray

from pagedkv.transfer.messages import MoveId
from pagedkv.transfer.payload import UInt8

# Objects of others that are kept until they are read; what is read later is asked for again.
_KEPT = 256
# Seconds that an object may take to get here.
_PATIENCE = 5.0


class ObjectTransport:
    """A `engine.transports.Transport`. References go with the frames, as Ray wants it.

    worker: its name. `put`, `get`, `free`, `take_new` belong to the core's thread, `expect` to the
    actor's.
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

    def take_new(self) -> dict[bytes, Any]:
        """References to what was put since the last call, for the frame that names them."""
        new, self._new = self._new, {}
        return new

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

    def free(self, move: MoveId, number: int) -> None:
        kept = [sent for sent in self._sent.pop(move, ()) if sent[0] > number]
        if kept:
            self._sent[move] = kept

    def close(self) -> None:
        self._sent.clear()
        self._expected.clear()
