"""What the sanitizer believes: a second account of every row, block and slot.

It is kept from what the verbs were asked to do and from the table entries that came of it, never
from the pool's own counts, so a fault in the one does not hide in the other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedkv.cache.sanitizer.prints import PrefixPrints, UInt64
from pagedkv.cache.sanitizer.sites import Trail
from pagedkv.cache.table import repeat_ranges
from pagedkv.cache.types import NULL_BLOCK, Int32, Int64

NOT_REPORTED, NOT_KNOWN = -1, -2  # of the tokens written for a reservation

Space = tuple[str | bytes | None, bytes | None, bool]  # namespace, extra, in the public part


class Moved(NamedTuple):
    """Table entries that changed: places in the arrays given, blocks before and after."""

    places: Int64
    old: Int32
    new: Int32


class Shadow:
    """Arrays by block id [num_blocks + 1], by slot [num_blocks + 1, B] or by row [max_seqs]."""

    def __init__(self, num_blocks: int, block_size: int, max_seqs: int, width: int) -> None:
        self.block_size, self.max_seqs = block_size, max_seqs
        # By block.
        self.references = np.zeros(num_blocks + 1, np.int64)  # table entries and copy sources
        self.leases = np.zeros(num_blocks + 1, np.int64)
        self.generations = np.zeros(num_blocks + 1, np.int64)  # times it was allocated
        self.filled = np.zeros(num_blocks + 1, np.int64)  # leading slots with committed tokens
        self.outdated = np.zeros(num_blocks + 1, np.bool_)  # K/V from before a reset of the cache
        self.spaces = np.zeros(num_blocks + 1, np.int32)  # who may find it; 0: not known
        self.allocated, self.freed = Trail(num_blocks + 1), Trail(num_blocks + 1)
        # What the K/V store has yet to be told of.
        self.fresh = np.zeros(num_blocks + 1, np.bool_)  # allocated and not written to yet
        self.dirty = np.zeros(num_blocks + 1, np.bool_)  # may hold K/V of its last use
        self.to_seal = np.zeros(num_blocks + 1, np.bool_)  # published, no checksum yet
        self.to_verify = np.zeros(num_blocks + 1, np.bool_)  # hit, checksum not compared yet
        # By slot.
        self.tokens = np.zeros((num_blocks + 1, block_size), np.int32)
        self.prints = np.zeros((num_blocks + 1, block_size), np.uint64)
        # By row.
        self.blocks = np.zeros((max_seqs, width), np.int32)
        self.seqs = np.zeros(max_seqs, np.int64)  # 0: not in use
        self.lengths = np.zeros(max_seqs, np.int64)
        self.reserved = np.zeros(max_seqs, np.int64)  # 0 too when there is no reservation
        self.copy_sources = np.zeros(max_seqs, np.int64)
        self.copied = np.zeros(max_seqs, np.bool_)  # the pending copy was reported as done
        self.written = np.full(max_seqs, NOT_REPORTED, np.int64)  # tokens of the reservation
        self.landed = np.zeros((max_seqs, width), np.bool_)  # its entries, written as whole blocks
        self.writes_reported = False  # an engine tells of its writes: then none may be missing
        self.public = np.zeros(max_seqs, np.int64)  # leading tokens without a namespace
        self.row_spaces = np.zeros((max_seqs, 2), np.int32)  # of the public and the private part
        self.outdated_rows = np.zeros(max_seqs, np.bool_)  # what they compute is outdated
        self.opened, self.changed, self.closed = (Trail(max_seqs) for _ in range(3))
        self._spaces: dict[Space, int] = {}
        self.chain = PrefixPrints().extend

    def space(self, namespace: str | bytes | None, extra: bytes | None, public: bool) -> int:
        """A number, from 1 on, for who may find a block: the public part has no namespace."""
        key = (None if public else namespace, extra, public)
        return self._spaces.setdefault(key, len(self._spaces) + 1)

    def space_of(self, rows: Int64, at: Int64) -> Int32:
        """Who may find the blocks at entries (row, at) once they are published."""
        private = at >= self.public[rows] // self.block_size
        spaces: Int32 = self.row_spaces[rows, private.astype(np.int64)]
        return spaces

    def rows(self, seqs: Int64) -> Int64:
        rows: Int64 = seqs % self.max_seqs
        return rows

    def num_blocks(self, row: int) -> int:
        return -(-int(self.lengths[row] + self.reserved[row]) // self.block_size)

    def holders(self, block: int) -> list[int]:
        """Sequences whose rows name the block, ascending."""
        rows = np.flatnonzero((self.blocks == block).any(axis=1))
        return sorted(self.seqs[rows].tolist())

    def slots(self, rows: Int64, starts: Int64, counts: Int64) -> Int64:
        """Slots of positions [start, start + count) of each row, flat int64 [sum counts]."""
        owner, place = repeat_ranges(counts)
        index, offset = np.divmod(starts[owner] + place, self.block_size)
        slots: Int64 = self.blocks[rows[owner], index].astype(np.int64) * self.block_size + offset
        return slots

    def end_reservations(self, rows: Int64) -> None:
        """Nothing is reserved any more; what was reported of it is forgotten."""
        self.reserved[rows] = 0
        self.copied[rows] = False
        self.written[rows] = NOT_REPORTED
        self.landed[rows] = False

    def set_entries(self, rows: Int64, at: Int64, blocks: Int32) -> Moved:
        """Sets entries (row, at), counts their blocks, and returns those that changed."""
        old = self.blocks[rows, at]
        places = np.flatnonzero(old != blocks)
        old, new = old[places], blocks[places]
        self.blocks[rows[places], at[places]] = new
        np.add.at(self.references, new, 1)
        np.subtract.at(self.references, old, 1)
        self.references[NULL_BLOCK] = 0
        return Moved(places, old, new)

    def fill(self, rows: Int64, starts: Int64, tokens: Int32, counts: Int64) -> None:
        """Tokens are in place from position `start` of each row on (flat [sum counts])."""
        slots = self.slots(rows, starts, counts)
        prints = self.expected_prints(rows, starts, tokens, counts)
        self.tokens.reshape(-1)[slots] = tokens
        self.prints.reshape(-1)[slots] = prints
        ends = slots % self.block_size + 1
        np.maximum.at(self.filled, slots // self.block_size, ends)

    def expected_prints(self, rows: Int64, starts: Int64, tokens: Int32, counts: Int64) -> UInt64:
        """Fingerprints of tokens that continue each row at `start`."""
        index, offset = np.divmod(np.maximum(starts, 1) - 1, self.block_size)
        before = self.prints[self.blocks[rows, index], offset]
        before = np.where(starts > 0, before, np.uint64(0))
        return self.chain(before, tokens, counts)
