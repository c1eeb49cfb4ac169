"""The block table: one row a sequence, and what belongs to the row."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagedkv.cache.errors import OutOfSequences
from pagedkv.cache.index import Frames, make_frames
from pagedkv.cache.types import NUM_GROUPS, Int32, Int64, SeqId

NO_RESERVATION = -1


def int_array(values: Sequence[int] | npt.NDArray[np.integer], what: str) -> Int64:
    """Outside integers as int64 [n]; ValueError for anything else."""
    try:
        if isinstance(values, np.ndarray):
            if values.ndim == 1 and values.dtype.kind in "iu" and values.dtype != np.uint64:
                return values.astype(np.int64, copy=False)
        elif not isinstance(values, (str, bytes, bytearray)):
            # Twice as fast as numpy on a list, and it checks type and range on the way.
            packed = array("q", values)
            return np.frombuffer(packed, np.int64) if packed else np.zeros(0, np.int64)
    except (TypeError, OverflowError):
        pass
    raise ValueError(f"{what} must be a flat list of integers, got {values!r:.200}")


class BlockTable:
    """Rows of the block table and their lengths; all arrays are indexed by row.

    A sequence id is (a serial that is never used again) * max_seqs + row, so a whole batch of ids
    is checked and turned into rows by arithmetic.
    """

    def __init__(self, max_seqs: int, width: int, block_size: int) -> None:
        self.max_seqs, self.width, self.block_size = max_seqs, width, block_size
        self.group_blocks = np.zeros((NUM_GROUPS, max_seqs, width), np.int32)
        self.blocks = self.group_blocks[0]
        self.seqs = np.zeros(max_seqs, np.int64)  # 0: the row is not in use
        self.lengths = np.zeros(max_seqs, np.int64)  # committed tokens
        self.reserved = np.full(max_seqs, NO_RESERVATION, np.int64)
        self.group_copy_sources = np.zeros((NUM_GROUPS, max_seqs), np.int32)  # 0: no copy pending
        self.copy_sources = self.group_copy_sources[0]
        self.public = np.zeros(max_seqs, np.int64)
        self.found = np.zeros(max_seqs, np.int64)  # tokens that `open` found cached
        # Holds K/V from before a reset of the cache: must not publish a first block.
        self.outdated = np.zeros(max_seqs, np.bool_)
        self.stamps = np.zeros(max_seqs, np.int64)  # when an entry of the row was last changed
        self.clock = 0
        self.namespaces: list[tuple[str | bytes | None, bytes | None]] = [(None, None)] * max_seqs
        self.frames: list[Frames] = [make_frames(None, None)] * max_seqs
        self._unused = list(range(max_seqs - 1, -1, -1))
        self._next_serial = 1
        self._mark = np.zeros(max_seqs, np.int64)  # scratch of `find`
        # The ids that `find` was given last, as bytes, and their rows: a step asks for the same
        # several times. None: one of them may have been closed since.
        self._asked: bytes | None = None
        self._answer = np.zeros(0, np.int64)

    @property
    def num_open(self) -> int:
        return self.max_seqs - len(self._unused)

    def find(self, seqs: Sequence[int] | Int64) -> Int64:
        """Rows of open sequences, for reading only.

        KeyError names an unknown id, ValueError a repeated one.
        """
        ids = int_array(seqs, "sequence ids")
        asked = ids.tobytes()
        if asked == self._asked:
            return self._answer
        rows = ids % self.max_seqs
        known = self.seqs[rows] == ids
        known &= ids > 0
        if np.count_nonzero(known) < len(ids):
            bad = ids[~known][0]
            raise KeyError(f"sequence {bad} is not open")
        places = np.arange(len(rows))
        self._mark[rows] = places
        again = self._mark[rows] != places
        if np.count_nonzero(again):
            raise ValueError(f"sequence {ids[again][0]} is named twice in one call")
        rows.flags.writeable = False
        self._asked, self._answer = asked, rows
        return rows

    def need(self, n: int) -> None:
        """Raises OutOfSequences unless n more rows can be taken."""
        if n > len(self._unused):
            raise OutOfSequences(n, self.num_open, self.max_seqs)

    def take(
        self,
        namespace: str | bytes | None,
        extra: bytes | None,
        frames: Frames,
        public: int,
    ) -> int:
        """Puts a new, empty sequence into an unused row and returns the row."""
        row = self._unused.pop()
        self.seqs[row] = self._next_serial * self.max_seqs + row
        self._next_serial += 1
        self.namespaces[row] = (namespace, extra)
        self.frames[row] = frames
        self.public[row] = public
        self.clock += 1
        self.stamps[row] = self.clock
        return row

    def give_back(self, row: int) -> None:
        """Empties a row whose blocks have been released."""
        self.blocks[row, : self.num_blocks(row)] = 0
        self.seqs[row] = self.lengths[row] = self.public[row] = 0
        self.found[row] = self.stamps[row] = 0
        self.outdated[row] = False
        self._unused.append(row)
        self._asked = None

    def seq(self, row: int) -> SeqId:
        return SeqId(int(self.seqs[row]))

    def num_blocks(self, row: int) -> int:
        """Table entries in use: committed and reserved."""
        return -(-int(self.lengths[row] + max(self.reserved[row], 0)) // self.block_size)

    def write(self, rows: Int64, at: Int64, blocks: Int32 | int) -> None:
        """Sets entries (row, at) and marks the rows as changed. Nothing else sets one."""
        self.blocks[rows, at] = blocks
        self.clock += 1
        self.stamps[rows] = self.clock

    def slots(self, rows: Int64, starts: Int64, counts: Int64) -> Int64:
        """Slots of positions [start, start + count) of each row, flat int64 [sum counts]."""
        if np.count_nonzero(counts == 1) < len(counts):
            owner, place = repeat_ranges(counts)
            rows, starts = rows[owner], starts[owner] + place
        index, offset = np.divmod(starts, self.block_size)
        slots: Int64 = self.blocks[rows, index].astype(np.int64) * self.block_size + offset
        return slots

    def open_rows(self) -> Int64:
        """Rows in use, oldest sequence first."""
        rows = self.seqs.nonzero()[0]
        by_age: Int64 = rows[np.argsort(self.seqs[rows] // self.max_seqs)]
        return by_age

    def unused_rows(self) -> list[int]:
        """Rows that are not in use; the last is taken next."""
        return self._unused

    @property
    def next_serial(self) -> int:
        return self._next_serial

    def load(self, rows: Int64, blocks: Int32, unused: list[int], next_serial: int) -> None:
        """Takes over saved entries; the other arrays are set by the caller."""
        self.blocks[rows, : blocks.shape[1]] = blocks
        self._unused = unused
        self._next_serial = next_serial
        self._asked = None


def repeat_ranges(counts: Int64) -> tuple[Int64, Int64]:
    """For ragged rows: (owner of each element, its place inside the owner), flat [sum counts]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
