"""K/V between workers through Ray's object store: between hosts, or zero copy on one."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import ray

from pagedkv.transfer.messages import Data, MoveId, unpack
from pagedkv.transfer.payload import UInt8

# Bytes of others that are kept until they are read; what comes beyond that is asked for again.
_KEPT = 256 * 2**20
# Seconds that an object may take to get here.
_PATIENCE = 5.0


class Parcel(NamedTuple):
    """An object, and the name by which a frame refers to it."""

    name: bytes
    object_ref: Any


async def fetched(parcel: Parcel) -> UInt8 | None:
    """The bytes, mapped from this host's object store. None: they did not get here."""
    try:
        return np.asarray(await asyncio.wait_for(parcel.object_ref, _PATIENCE))
    except (ray.exceptions.RayError, TimeoutError):  # such as: its owner is gone
        return None


class ObjectTransport:
    """An `engine.transports.Transport`. Objects go with the frames that name them.

    most: bytes of payloads that have come and wait to be read. `expect` belongs to the actor's
    thread, all else to the core's.
    """

    def __init__(self, most: int = _KEPT) -> None:
        self._most = most
        self._sent: dict[MoveId, list[tuple[int, Any]]] = {}
        self._new: dict[bytes, Any] = {}
        self._lock = threading.Lock()
        self._expected: OrderedDict[bytes, UInt8 | None] = OrderedDict()
        self._waiting = 0

    @property
    def num_waiting_bytes(self) -> int:
        """Of payloads that have come and were not read."""
        return self._waiting

    def put(self, move: MoveId, number: int, blocks: UInt8) -> bytes:
        object_ref = ray.put(blocks.reshape(-1))
        name: bytes = object_ref.binary()
        self._sent.setdefault(move, []).append((number, object_ref))
        self._new[name] = object_ref
        return name

    def named_in(self, frame: bytes) -> Parcel | None:
        """What a frame of this worker names, to go with it."""
        message = unpack(frame) if self._new else None
        name = message.payload if isinstance(message, Data) else b""
        return Parcel(name, self._new.pop(name)) if name in self._new else None

    def expect(self, name: bytes, payload: UInt8 | None) -> None:
        """What the next frame refers to: to be called in the order in which frames are handed over.

        It is let go of where there is no room for it.
        """
        with self._lock:
            size = 0 if payload is None else payload.nbytes
            room = self._waiting + size <= self._most
            self._expected[name] = payload if room else None
            self._waiting += size if room else 0

    def get(self, reference: bytes) -> UInt8 | None:
        """Frames before the one with this reference have been read, or never will be."""
        with self._lock:
            if reference not in self._expected:
                return None
            while True:
                name, payload = self._expected.popitem(last=False)
                self._waiting -= 0 if payload is None else payload.nbytes
                if name == reference:
                    return payload

    def is_intact(self) -> bool:
        return True  # objects are never written again

    def free(self, move: MoveId, number: int) -> None:
        kept = [sent for sent in self._sent.pop(move, ()) if sent[0] > number]
        if kept:
            self._sent[move] = kept

    def close(self) -> None:
        self._sent.clear()
        self._new.clear()
        with self._lock:
            self._expected.clear()
            self._waiting = 0
