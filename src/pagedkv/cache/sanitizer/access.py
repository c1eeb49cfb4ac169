"""What a kernel is about to read, copy and write, held against the shadow.

An embedding engine reports it in this order, for every step: `copies`, `writes`, `reads`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedkv.cache.errors import Misuse
from pagedkv.cache.sanitizer.report import Reporter
from pagedkv.cache.sanitizer.shadow import NOT_REPORTED, Shadow
from pagedkv.cache.types import NULL_BLOCK, Int32, Int64, Mask


class Export(NamedTuple):
    """What an exported table was made of, and when."""

    rows: Int64
    seqs: Int64
    stamps: Int64  # when an entry of the row was last changed
    blocks: Int32  # [n, w], padded with 0
    site: int
    step: int


class Access:
    """Checks of what goes to the kernels. n sequences, T tokens, w table width, c copies."""

    def __init__(self, shadow: Shadow, report: Reporter) -> None:
        self._shadow, self._report = shadow, report
        self._size = shadow.block_size

    def copies(self, copies: Int32) -> None:
        """Rows (source, destination, filled slots) about to be copied, int32 [c, 3]."""
        shadow, fail = self._shadow, self._report.fail
        pending = np.flatnonzero((shadow.copy_sources > 0) & ~shadow.copied)
        index, fill = np.divmod(shadow.lengths[pending], self._size)
        wanted = {
            int(shadow.blocks[row, i]): (int(shadow.copy_sources[row]), int(f), int(row))
            for row, i, f in zip(pending, index, fill, strict=True)
        }
        for source, destination, filled in copies.tolist():
            if destination not in wanted:
                fail(
                    Misuse.FOREIGN_WRITE,
                    f"a copy of block {source} goes to block {destination}, for which no "
                    "reservation has one pending",
                    block=destination,
                )
            right, slots, row = wanted.pop(destination)
            seq = int(shadow.seqs[row])
            if source != right:
                fail(
                    Misuse.FREED_READ,
                    f"block {source} is copied to {destination}, block {right} is the source",
                    block=source,
                    seq=seq,
                )
            if filled != slots:
                fail(
                    Misuse.PAST_EXTENT if filled > slots else Misuse.SLOT_NEVER,
                    f"{filled} slots of block {source} are copied, {slots} are filled",
                    block=source,
                    seq=seq,
                )
            shadow.copied[row] = True
        shadow.dirty[copies[:, 1]] = True

    def reported(self) -> tuple[Int32, Int64, Int64, Int64]:
        """Arguments of `copies` and `writes` for what they have been told of open reservations."""
        shadow = self._shadow
        copied = np.flatnonzero(shadow.copied)
        index, fill = np.divmod(shadow.lengths[copied], self._size)
        copies = np.stack((shadow.copy_sources[copied], shadow.blocks[copied, index], fill), axis=1)
        rows = np.flatnonzero(shadow.written > 0)
        counts = shadow.written[rows]
        slots = shadow.slots(rows, shadow.lengths[rows], counts)
        return copies.astype(np.int32), shadow.seqs[rows], counts, slots

    def landed(self) -> Int32:
        """Blocks of open reservations of which `fills` has been told."""
        blocks: Int32 = self._shadow.blocks[self._shadow.landed]
        return blocks

    def writes(self, seqs: Int64, counts: Int64, slots: Int64) -> None:
        """Slots about to be written: `counts[i]` for sequence i, flat int64 [T]."""
        shadow, fail = self._shadow, self._report.fail
        shadow.writes_reported = True
        rows = self._rows(seqs, Misuse.FOREIGN_WRITE)
        starts = shadow.lengths[rows]
        again = shadow.written[rows] > 0
        if np.count_nonzero(again) or len(np.unique(rows)) < len(rows):
            self._written_again(seqs, rows, again)
        for i in np.flatnonzero((counts < 0) | (counts > shadow.reserved[rows])).tolist():
            fail(
                Misuse.FOREIGN_WRITE,
                f"sequence {seqs[i]} writes {counts[i]} tokens at position {starts[i]}, "
                f"{shadow.reserved[rows[i]]} are reserved",
                seq=int(seqs[i]),
            )
        for row in rows[(shadow.copy_sources[rows] > 0) & ~shadow.copied[rows]].tolist():
            fail(
                Misuse.SLOT_NEVER,
                f"sequence {shadow.seqs[row]} writes behind a copy of block "
                f"{shadow.copy_sources[row]} that was not made",
                block=int(shadow.copy_sources[row]),
                seq=int(shadow.seqs[row]),
            )
        expected = shadow.slots(rows, starts, counts)
        if not np.array_equal(slots, expected):
            self._wrong_slots(np.repeat(seqs, counts), slots, expected)
        blocks = np.unique(slots // self._size)
        # A copy that has been made reads no more.
        done = shadow.copy_sources[shadow.copied & (shadow.copy_sources > 0)]
        holders = shadow.references[blocks] - (done == blocks[:, None]).sum(axis=1)
        shared = blocks[(holders != 1) | (shadow.leases[blocks] > 0)]
        if len(shared):
            owner = int(np.repeat(seqs, counts)[np.isin(slots // self._size, shared).argmax()])
            fail(
                Misuse.SHARED_WRITE,
                f"sequence {owner} writes into block {shared[0]}, which has "
                f"{holders[blocks == shared[0]][0]} holders and {shadow.leases[shared[0]]} leases",
                block=int(shared[0]),
                seq=owner,
            )
        shadow.written[rows] = counts
        shadow.dirty[blocks] = True

    def reads(self, seqs: Int64, lengths: Int32 | Int64, tables: Int32) -> None:
        """Positions [0, length) about to be read through the table rows int32 [n, w]."""
        shadow, fail = self._shadow, self._report.fail
        rows = self._rows(seqs, Misuse.FREED_READ, tables)
        known = shadow.lengths[rows] + np.maximum(shadow.written[rows], 0)
        known = np.where(shadow.written[rows] < 0, known + shadow.reserved[rows], known)
        needed = -(-lengths.astype(np.int64) // self._size)
        for i in np.flatnonzero((lengths > known) | (needed > tables.shape[1])).tolist():
            fail(
                Misuse.PAST_EXTENT,
                f"{lengths[i]} positions of sequence {seqs[i]} are read through "
                f"{tables.shape[1]} table entries, {known[i]} are in place",
                seq=int(seqs[i]),
            )
        width = int(needed.max(initial=0))
        used = np.arange(width) < needed[:, None]
        differs = (tables[:, :width] != shadow.blocks[rows, :width]) & used
        if differs.any():
            i, at = np.argwhere(differs)[0].tolist()
            block, right = int(tables[i, at]), int(shadow.blocks[rows[i], at])
            held = self._is_block(block) and shadow.references[block] > 0
            fail(
                Misuse.STALE_TABLE if held else Misuse.FREED_READ,
                f"sequence {seqs[i]} is read through block {block} at entry {at}, where its table "
                f"has block {right}",
                block=block if self._is_block(block) else None,
                seq=int(seqs[i]),
            )

    def blocks(self, blocks: Int32) -> None:
        """Blocks about to be read or written as a whole."""
        shadow = self._shadow
        for block in blocks[(blocks < 0) | (blocks >= len(shadow.references))].tolist():
            self._report.fail(
                Misuse.FREED_READ,
                f"block {block} is transferred, and the pool does not have it",
                block=block,
            )
        for block in blocks[
            (shadow.references[blocks] <= 0) & (shadow.leases[blocks] <= 0)
        ].tolist():
            self._report.fail(
                Misuse.FREED_READ,
                f"block {block} is transferred, and nobody holds or leases it",
                block=block,
            )

    def fills(self, blocks: Int32) -> None:
        """Blocks about to be written as a whole, in any order; reserved slots in them are then
        written, as soon as those before them are.
        """
        self.blocks(blocks)
        shadow, size = self._shadow, self._size
        for row in np.flatnonzero(shadow.reserved > 0).tolist():
            length, reserved = int(shadow.lengths[row]), int(shadow.reserved[row])
            entries = slice(length // size, -(-(length + reserved) // size))
            new = np.isin(shadow.blocks[row, entries], blocks)
            if not new.any():
                continue
            there = shadow.landed[row, entries]
            there |= new
            before = max(0, int(shadow.written[row]))
            there[: (length + before) // size - length // size] = True  # by slots
            full = len(there) if there.all() else int(there.argmin())
            shadow.written[row] = NOT_REPORTED
            count = np.array([max(before, min(reserved, (length // size + full) * size - length))])
            slots = shadow.slots(np.array([row]), shadow.lengths[[row]], count)
            self.writes(shadow.seqs[[row]], count, slots)

    def export_is_current(self, export: Export, now: Int64) -> None:
        """An exported table is used: its rows must not have changed since. now: their stamps."""
        changed = np.flatnonzero(export.stamps != now)
        if not len(changed):
            return
        place, shadow, report = changed[0], self._shadow, self._report
        seq, row = int(export.seqs[place]), int(export.rows[place])
        before = export.blocks[place]
        closed = shadow.seqs[row] != seq
        gone = before[(before > 0) & (closed | (before != shadow.blocks[row, : len(before)]))]
        when = "" if export.step < 0 else f" in step {export.step}"
        lines = report.sites.lines(export.site)
        lines[0] = f"the table of sequence {seq} was exported{when}, by {lines[0]}"
        lines.append("and " + ("the sequence was closed" if closed else "its row has changed"))
        report.fail(
            Misuse.STALE_TABLE,
            "\n    ".join(lines) + " since",
            block=int(gone[0]) if len(gone) else None,
            seq=seq,
        )

    def _rows(self, seqs: Int64, kind: Misuse, tables: Int32 | None = None) -> Int64:
        rows = self._shadow.rows(seqs)
        for i in np.flatnonzero(self._shadow.seqs[rows] != seqs).tolist():
            block = 0 if tables is None or not tables.shape[1] else int(tables[i, 0])
            self._report.fail(
                kind,
                f"sequence {seqs[i]} is used, and it is closed",
                block=block if self._is_block(block) else None,
                seq=int(seqs[i]),
            )
        return rows

    def _is_block(self, block: int) -> bool:
        return NULL_BLOCK < block < len(self._shadow.references)

    def _written_again(self, seqs: Int64, rows: Int64, again: Mask) -> None:
        if not again.any():
            again[np.unique(rows, return_index=True)[1]] = True
            again = ~again
        seq, one = int(seqs[again][0]), np.ones(np.count_nonzero(again), np.int64)
        slot = int(self._shadow.slots(rows[again], self._shadow.lengths[rows[again]], one)[0])
        self._report.fail(
            Misuse.SLOT_TWICE,
            f"slot {slot}, by sequence {seq}, whose tokens were written in this step already",
            block=slot // self._size,
            seq=seq,
        )

    def _wrong_slots(self, owners: Int64, slots: Int64, expected: Int64) -> None:
        """Says what is wrong with slots that are not those of the reservations."""
        shadow, fail, size = self._shadow, self._report.fail, self._size
        order = np.sort(slots)
        twice = order[1:][order[1:] == order[:-1]]
        if len(twice):
            slot = int(twice[0])
            fail(Misuse.SLOT_TWICE, f"slot {slot}", block=slot // size)
        missing = expected[~np.isin(expected, slots)]
        foreign = slots[~np.isin(slots, expected)]
        if len(foreign):
            place = int(np.flatnonzero(slots == foreign[0])[0])
            block, seq = int(foreign[0]) // size, int(owners[min(place, len(owners) - 1)])
            inside = self._is_block(block)
            holders = shadow.holders(block) if inside else []
            # Behind the filled slots of a block of its own it is a wrong place, and seen by nobody.
            shared = seq in holders and (
                len(holders) > 1
                or shadow.leases[block] > 0
                or foreign[0] % size < shadow.filled[block]
            )
            fail(
                Misuse.SHARED_WRITE if shared else Misuse.FOREIGN_WRITE,
                f"sequence {seq} writes slot {foreign[0]}, and has not reserved it",
                block=block if inside else None,
                seq=seq,
            )
        if len(missing):
            place = int(np.flatnonzero(expected == missing[0])[0])
            fail(
                Misuse.SLOT_NEVER,
                f"slot {missing[0]} was reserved by sequence {owners[place]}",
                block=int(missing[0]) // size,
                seq=int(owners[place]),
            )
        place = int(np.flatnonzero(slots != expected)[0])
        fail(
            Misuse.FOREIGN_WRITE,
            f"slot {slots[place]} is written for sequence {owners[place]}, whose slot there is "
            f"{expected[place]}",
            block=int(slots[place]) // size,
            seq=int(owners[place]),
        )
