"""What the prefix cache has published and withdrawn, in order, for whoever mirrors it elsewhere.

An event is the serial of a node of the index and, when it was published, the key that it has
there: everything a name depends on, and bytes that exist already. Serials are never used again, so
one stands for one content for ever. Nothing is logged before somebody listens.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from pagedkv.cache.errors import EventGap
from pagedkv.cache.index import PrefixIndex
from pagedkv.cache.types import Int32

_FEWEST = 1024  # events kept, in the smallest pools


class Published(NamedTuple):
    """A block has got its name; `parent`: serial of the block before it, 0 for a first block.

    `frame` and `tokens` as in `index.Frames` and `index.token_bytes`; fewer tokens than a block
    has slots make a partly filled tail, which is never a parent.
    """

    serial: int
    parent: int
    frame: bytes
    tokens: bytes


class Withdrawn(NamedTuple):
    """The name is gone: the block was evicted, or is about to be written."""

    serial: int


class Cleared(NamedTuple):
    """All names are gone."""


Event = Published | Withdrawn | Cleared


class Picture(NamedTuple):
    """All names as events, parents first, and the number of the next event after them."""

    next_seq: int
    published: list[Published]


class EventLog:
    """The newest events of a manager, numbered 0, 1, 2, ... since it was first listened to.

    Any number of readers, each with the number of its next event. A reader that has waited too
    long gets EventGap and starts again from a `picture`; so does a new one. Events of the past are
    no part of a manager's state: a restored one has none.

    capacity: events that are kept at least; a picture of a full pool is never longer than the
    default, two for each block.
    """

    def __init__(self, index: PrefixIndex, extents: Int32, capacity: int | None = None) -> None:
        self._index, self._extents = index, extents
        self._capacity = max(_FEWEST, 2 * len(extents)) if capacity is None else capacity
        # Three columns: the serial, negative when it was withdrawn and 0 when all were cleared;
        # key and filled slots of what was published.
        self._serials = array("q")
        self._keys: list[bytes] = []
        self._extents_then = array("q")
        self._first = 0  # number of the first that is kept

    @property
    def next_seq(self) -> int:
        """The number that the next event will have."""
        return self._first + len(self._serials)

    def since(self, seq: int) -> list[Event]:
        """Events `seq`, `seq` + 1, ... up to now; EventGap if the log has forgotten some of them.

        ValueError for a number that has not been reached.
        """
        if not 0 <= seq <= self.next_seq:
            raise ValueError(f"seq={seq} must be from 0 to {self.next_seq}, the next event")
        if seq < self._first:
            raise EventGap(seq, self._first)
        start = seq - self._first
        columns = self._serials[start:], self._keys[start:], self._extents_then[start:]
        return [
            (_published(serial, key, extent) if serial > 0 else Withdrawn(-serial))
            if serial
            else Cleared()
            for serial, key, extent in zip(*columns, strict=True)
        ]

    def picture(self) -> Picture:
        """All names as they are now. O(pool)."""
        index = self._index
        named = sorted((serial, b) for b, serial in enumerate(index.serials) if serial)
        extents = self._extents.tolist()
        return Picture(self.next_seq, [_published(s, index.keys[b], extents[b]) for s, b in named])

    # ---- what the index does ----------------------------------------------------------------

    def publish(self, blocks: list[int], extent: int) -> None:
        """Notes blocks that have just got their names, `extent` slots of each filled."""
        serials, keys = self._index.serials, self._index.keys
        self._add([serials[b] for b in blocks], [keys[b] for b in blocks], extent)

    def withdraw(self, blocks: list[int]) -> None:
        """Notes blocks that are about to lose their names."""
        serials = self._index.serials
        self._add([-serials[b] for b in blocks], [b""] * len(blocks), 0)

    def clear(self) -> None:
        """Notes that all names are gone."""
        self._add([0], [b""], 0)

    def _add(self, serials: list[int], keys: list[bytes], extent: int) -> None:
        self._serials.extend(serials)
        self._keys += keys
        self._extents_then.extend([extent] * len(serials))
        surplus = len(self._serials) - self._capacity
        if surplus > self._capacity:  # not each time: what is kept has to be moved
            del self._serials[:surplus], self._keys[:surplus], self._extents_then[:surplus]
            self._first += surplus


def _published(serial: int, key: bytes, extent: int) -> Published:
    cut = len(key) - 4 * extent
    return Published(serial, int.from_bytes(key[:8]), key[8:cut], key[cut:])
