"""How K/V gets from one worker to another: the message has a reference, the transport the bytes.

A reference is found again by whoever receives it, as an array; where it cannot be found any more
the receiver asks for the data again. Senders keep a payload until it is freed.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from pagedkv.transfer.messages import MoveId
from pagedkv.transfer.payload import UInt8

# Segments that are kept for the next payloads, and mappings of other processes' segments.
_KEPT = 16
_PAGE = mmap.PAGESIZE
_COUNT = np.dtype("<u8")  # at the end of a segment: how often it has been written


class Transport(Protocol):
    """Of one worker; used by one thread at a time."""

    def put(self, move: MoveId, number: int, blocks: UInt8) -> bytes:
        """A reference to a copy of `blocks`, at most some dozen bytes; b"": send them themselves.

        blocks: uint8 [k, block_bytes].
        """
        ...

    def get(self, reference: bytes) -> UInt8 | None:
        """The bytes, flat, valid until the next call; None: they are not there any more.

        What is written to them the sender does not see.
        """
        ...

    def is_intact(self) -> bool:
        """Whether what `get` returned last has been the same from then until now.

        A sender that has given a move up may use its memory for another while it is still read.
        """
        ...

    def free(self, move: MoveId, number: int) -> None:
        """Payloads of the move up to message `number` are needed no more."""
        ...

    def close(self) -> None:
        """Nothing is sent or received any more."""
        ...


class InlineTransport:
    """No transport: the bytes travel in the messages. For tests, and where nothing is shared."""

    def put(self, move: MoveId, number: int, blocks: UInt8) -> bytes:
        return b""

    def get(self, reference: bytes) -> UInt8 | None:
        return None

    def is_intact(self) -> bool:
        return True

    def free(self, move: MoveId, number: int) -> None:
        pass

    def close(self) -> None:
        pass


class LocalTransport:
    """Between workers in one process, which share `payloads`: nothing is copied."""

    def __init__(self, payloads: dict[bytes, UInt8], worker: str) -> None:
        self._payloads, self._worker = payloads, worker
        self._sent: dict[MoveId, list[tuple[int, bytes]]] = {}

    def put(self, move: MoveId, number: int, blocks: UInt8) -> bytes:
        reference = f"{self._worker} {move.request} {move.epoch} {number}".encode()
        self._payloads[reference] = blocks.reshape(-1)
        self._sent.setdefault(move, []).append((number, reference))
        return reference

    def get(self, reference: bytes) -> UInt8 | None:
        return self._payloads.get(reference)

    def is_intact(self) -> bool:
        return True

    def free(self, move: MoveId, number: int) -> None:
        kept = []
        for sent in self._sent.pop(move, ()):
            if sent[0] <= number:
                del self._payloads[sent[1]]
            else:
                kept.append(sent)
        if kept:
            self._sent[move] = kept

    def close(self) -> None:
        for move in list(self._sent):
            self.free(move, max(number for number, _ in self._sent[move]))


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a payload lies. inode: of the segment, for descriptors are given again.

    count: how often the segment had been written with this payload.
    """

    pid: int
    descriptor: int
    inode: int
    size: int
    count: int


class _Segment:
    """Memory that other processes can map as well. It has no name: it ends with its last user."""

    def __init__(self, capacity: int) -> None:
        self.descriptor = os.memfd_create("pagedkv-move")
        size = -(-(capacity + _COUNT.itemsize) // _PAGE) * _PAGE
        os.ftruncate(self.descriptor, size)
        self.capacity = size - _COUNT.itemsize
        self.inode = os.fstat(self.descriptor).st_ino
        self._bytes = np.frombuffer(mmap.mmap(self.descriptor, size), np.uint8)

    def write(self, data: UInt8) -> int:
        """Returns how often it has been written. It is counted first: see `is_intact`."""
        count = _count(self._bytes)
        count += 1
        self._bytes[: len(data)] = data
        return int(count[0])

    def close(self) -> None:
        os.close(self.descriptor)


class SharedMemoryTransport:
    """Between processes of one user on one host. The receiver reads where the sender wrote.

    A segment is an anonymous file that the receiver opens through /proc/<pid>/fd: nothing appears
    in /dev/shm, and when processes die, in whatever way, the kernel takes the memory back.
    """

    def __init__(self) -> None:
        self._free: list[_Segment] = []
        self._sent: dict[MoveId, list[tuple[int, _Segment]]] = {}
        self._mapped: OrderedDict[tuple[int, int, int], UInt8] = OrderedDict()
        self._read: tuple[UInt8, int] | None = None  # the segment read last, and its count then

    @property
    def num_segments(self) -> int:
        """Segments that exist now, those that are kept for later among them."""
        return len(self._free) + sum(map(len, self._sent.values()))

    def put(self, move: MoveId, number: int, blocks: UInt8) -> bytes:
        data = blocks.reshape(-1)
        segment = self._segment(len(data))
        count = segment.write(data)
        self._sent.setdefault(move, []).append((number, segment))
        place = _Place(os.getpid(), segment.descriptor, segment.inode, len(data), count)
        return msgspec.msgpack.encode(place)

    def get(self, reference: bytes) -> UInt8 | None:
        self._read = None
        try:
            place = msgspec.msgpack.decode(reference, type=_Place)
        except msgspec.DecodeError:
            return None
        key = place.pid, place.descriptor, place.inode
        if key not in self._mapped:
            found = _map(place)
            if found is None:
                return None
            self._mapped[key] = found
            if len(self._mapped) > _KEPT:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(key)
        self._read = self._mapped[key], place.count
        return self._mapped[key][: place.size]

    def is_intact(self) -> bool:
        return self._read is None or int(_count(self._read[0])[0]) == self._read[1]

    def free(self, move: MoveId, number: int) -> None:
        kept = []
        for sent in self._sent.pop(move, ()):
            if sent[0] > number:
                kept.append(sent)
            elif len(self._free) < _KEPT:
                self._free.append(sent[1])
            else:
                sent[1].close()
        if kept:
            self._sent[move] = kept

    def close(self) -> None:
        for segment in self._segments():
            segment.close()
        self._free.clear()
        self._sent.clear()
        self._mapped.clear()
        self._read = None

    def _segments(self) -> Iterator[_Segment]:
        yield from self._free
        for sent in self._sent.values():
            yield from (segment for _, segment in sent)

    def _segment(self, size: int) -> _Segment:
        """The smallest free one that is large enough, or a new one."""
        fitting = [segment for segment in self._free if segment.capacity >= size]
        if not fitting:
            return _Segment(size)
        segment = min(fitting, key=lambda segment: segment.capacity)
        self._free.remove(segment)
        return segment


def _count(segment: UInt8) -> npt.NDArray[np.uint64]:
    return segment[-_COUNT.itemsize :].view(_COUNT)


def _map(place: _Place) -> UInt8 | None:
    """All of a segment. None: its process is gone, or has closed it."""
    try:  # the descriptor may be that of a pipe by now, whose opening must not wait for a writer
        descriptor = os.open(
            f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDONLY | os.O_NONBLOCK
        )
    except OSError:
        return None
    try:
        facts = os.fstat(descriptor)
        if facts.st_ino != place.inode or not 0 < place.size <= facts.st_size - _COUNT.itemsize:
            return None
        return np.frombuffer(
            mmap.mmap(descriptor, facts.st_size, access=mmap.ACCESS_COPY), np.uint8
        )
    finally:
        os.close(descriptor)
