"""What every verb must have done to rows, blocks and slots.

One method a verb, under the verb's own name. It is called after the verb with the verb's result and
arguments, compares what has become of the block table and the counts with what the verb promises,
and brings the shadow up to date.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pagedkv.cache.errors import Misuse
from pagedkv.cache.lease import Lease
from pagedkv.cache.sanitizer.checks import Checks
from pagedkv.cache.sanitizer.report import Reporter
from pagedkv.cache.sanitizer.shadow import Moved, Shadow
from pagedkv.cache.sequence_data import unpack_sequence
from pagedkv.cache.table import int_array, repeat_ranges
from pagedkv.cache.types import (
    NULL_BLOCK,
    BlockId,
    Imported,
    Int32,
    Int64,
    Reservation,
    SeqId,
    Tokens,
    flatten_tokens,
    token_array,
)

if TYPE_CHECKING:
    from pagedkv.cache.manager import BlockManager

Name = str | bytes | None


class Watch:
    """Compares the manager with the shadow after every call."""

    def __init__(self, manager: BlockManager, shadow: Shadow, report: Reporter) -> None:
        self._manager, self._table, self._pool = manager, manager.table, manager.pool
        self._size = manager.block_size
        self._shadow, self._report = shadow, report
        self.leases: dict[int, Int32] = {}
        self._checks = Checks(manager, shadow, report)

    # ---- the life of a sequence ---------------------------------------------------------------

    def open(
        self,
        result: SeqId,
        tokens: Tokens = (),
        namespace: Name = None,
        public: int = 0,
        extra: bytes | None = None,
    ) -> None:
        row = result % self._shadow.max_seqs
        blocks = self._table.blocks[row, : -(-int(self._table.lengths[row]) // self._size)]
        self._opened(result, blocks, token_array(tokens), namespace, int(public), extra)
        self._checks.counts(blocks)
        for block in blocks[self._pool.extents[blocks] == 0].tolist():
            self._report.fail(
                Misuse.WRONG_HIT, f"block {block} has no name", block=block, seq=result
            )

    def import_sequence(self, result: Imported, data: bytes) -> None:
        facts = unpack_sequence(data)
        row = result.seq % self._shadow.max_seqs
        blocks = self._table.blocks[row, : -(-int(self._table.lengths[row]) // self._size)].copy()
        if self._table.copy_sources[row]:  # the tail that was found; the row has its copy already
            blocks[-1] = self._table.copy_sources[row]
        self._opened(result.seq, blocks, *facts[:4])
        self.reserve(result.reservation, [result.seq], [len(result.tokens)])

    def reserve(
        self, result: Reservation, seqs: Sequence[SeqId] | Int64, counts: Sequence[int] | Int64
    ) -> None:
        shadow, size = self._shadow, self._size
        ids, wanted = int_array(seqs, "seqs"), int_array(counts, "counts")
        rows = self._rows(ids)
        starts = shadow.lengths[rows]
        index, fill = np.divmod(starts, size)
        lasts = -(-(starts + wanted) // size)
        owner, _, moved = self._take_entries(rows, index, lasts)
        writers = owner[moved.places]
        copying = np.flatnonzero(moved.old)
        fresh, needed = len(moved.old) - len(copying), int((lasts - index - (fill > 0)).sum())
        if fresh != needed:
            self._checks.wrong_table(ids, f"{fresh} new blocks with the others, not {needed}")
        sources, copies, readers = moved.old[copying], moved.new[copying], writers[copying]
        shadow.copy_sources[rows[readers]] = sources
        np.add.at(shadow.references, sources, 1)
        self._allocated(moved.new, ids[writers])
        self._copied(sources, copies, fill[readers], ids[readers])
        writing = np.flatnonzero((fill > 0) & (wanted > 0))
        tails = shadow.blocks[rows[writing], index[writing]]
        self._checks.exclusive(tails, ids[writing], starts[writing], sources)
        shadow.filled[tails] = np.minimum(shadow.filled[tails], fill[writing])
        shadow.spaces[tails] = 0  # a name that a tail had is gone
        shadow.reserved[rows] = wanted
        self._checks.counts(np.concatenate([moved.new, sources, tails]))
        expected = np.stack([sources, copies, fill[readers].astype(np.int32)], axis=1)
        if not np.array_equal(result.copies, expected):
            self._checks.wrong_table(
                ids, f"copies {result.copies.tolist()}, not {expected.tolist()}"
            )
        if not np.array_equal(result.slots, shadow.slots(rows, starts, wanted)):
            self._checks.wrong_table(ids, "slots that its table does not lead to")

    def commit(
        self, result: None, seqs: Sequence[SeqId] | Int64, tokens: Sequence[Tokens] | Int32
    ) -> None:
        shadow, size = self._shadow, self._size
        ids = int_array(seqs, "seqs")
        rows = self._rows(ids)
        flat, counts = flatten_tokens(tokens, len(ids))
        starts = shadow.lengths[rows]
        index, ends = starts // size, starts + counts
        self._checks.written(ids, rows, starts, counts)
        shadow.fill(rows, starts, flat, counts)
        sources = self._end_copies(rows)
        owner, at, moved = self._take_entries(
            rows, index, -(-(starts + shadow.reserved[rows]) // size)
        )
        owners = owner[moved.places]
        self._checks.switched(ids[owners], at[moved.places], ends[owners], moved)
        if np.count_nonzero(shadow.reserved[rows] > counts):
            self._checks.given_back(ids, rows, ends, owner, at)
        shadow.lengths[rows] = ends
        shadow.end_reservations(rows)
        self._released(moved.old, ids[owners])
        self._checks.counts(np.concatenate([moved.old, moved.new, sources]))
        self._published(rows[owner], at)

    def cancel(self, result: None, seqs: Sequence[SeqId]) -> None:
        for row in self._rows(int_array(seqs, "seqs")).tolist():
            self._cut(row, int(self._shadow.lengths[row]))

    def fork(self, result: tuple[SeqId, ...], seq: SeqId, n: int = 1) -> None:
        shadow, row = self._shadow, self._row(seq)
        blocks = shadow.blocks[row, : shadow.num_blocks(row)].copy()
        for child in result:
            at = child % shadow.max_seqs
            self._hold(at, child, self._table.blocks[at, : len(blocks)])
            if not np.array_equal(shadow.blocks[at, : len(blocks)], blocks):
                self._checks.wrong_table([child], f"a table that is not that of sequence {seq}")
            for array in (shadow.lengths, shadow.public, shadow.row_spaces, shadow.outdated_rows):
                array[at] = array[row]
        self._checks.counts(blocks)

    def truncate(self, result: None, seq: SeqId, n: int) -> None:
        shadow, row = self._shadow, self._row(seq)
        self._cut(row, n)
        shadow.lengths[row] = n
        shadow.public[row] = min(int(shadow.public[row]), n)
        shadow.outdated_rows[row] &= n > 0

    def close(self, result: None, seq: SeqId) -> None:
        shadow, row = self._shadow, self._row(seq)
        at, fill = divmod(int(shadow.lengths[row]), self._size)
        tail = int(shadow.copy_sources[row] or shadow.blocks[row, at]) if fill else NULL_BLOCK
        self._cut(row, 0)
        if self._pool.extents[tail] and not shadow.spaces[tail]:
            self._published(np.array([row]), np.array([at]), np.array([tail]))
        shadow.seqs[row] = shadow.lengths[row] = shadow.public[row] = 0
        shadow.outdated_rows[row] = False
        shadow.closed.mark(np.array([row]), self._report.site, self._report.step, seq)
        if self._manager.num_open_sequences == 0:
            self._checks.nothing_held()

    # ---- the pool -----------------------------------------------------------------------------

    def evict(self, result: Int32, k: int) -> None:
        for block in result[self._shadow.references[result] > 0].tolist():
            self._report.fail(Misuse.HELD_REUSE, f"block {block} was evicted", block=block)
        for block in result[self._shadow.leases[result] > 0].tolist():
            self._report.fail(Misuse.PENDING_REUSE, f"block {block} was evicted", block=block)

    def reset_cache(self, result: None) -> None:
        shadow = self._shadow
        for block in np.flatnonzero(self._pool.extents).tolist():
            self._report.fail(Misuse.WRONG_HIT, f"block {block} can still be found", block=block)
        shadow.outdated |= shadow.filled > 0
        shadow.outdated_rows |= (shadow.lengths > 0) | (shadow.reserved > 0)

    def lease(self, result: Lease, blocks: Sequence[BlockId] | Int32) -> None:
        self.leases[result.id] = result.blocks
        self._shadow.leases[result.blocks] += 1
        self._checks.leases(result.blocks)

    def end_lease(self, result: None, lease_id: int) -> None:
        ids = self.leases.pop(lease_id)
        self._shadow.leases[ids] -= 1
        self._checks.leases(ids)

    # ---- parts of the verbs -------------------------------------------------------------------

    def _opened(
        self,
        seq: SeqId,
        blocks: Int32,
        tokens: Int32,
        namespace: Name,
        public: int,
        extra: bytes | None,
    ) -> None:
        shadow = self._shadow
        row = seq % shadow.max_seqs
        length = int(self._table.lengths[row])
        self._hold(row, seq, blocks)
        shadow.lengths[row], shadow.public[row] = length, public
        shadow.row_spaces[row] = [shadow.space(namespace, extra, p) for p in (True, False)]
        shadow.outdated_rows[row] = False
        if length:
            self._checks.found(seq, row, length, tokens)

    def _hold(self, row: int, seq: int, blocks: Int32) -> None:
        """A new row with blocks that were there already."""
        shadow = self._shadow
        shadow.seqs[row] = seq
        shadow.set_entries(np.full(len(blocks), row), np.arange(len(blocks)), blocks)
        for trail in (shadow.opened, shadow.changed):
            trail.mark(np.array([row]), self._report.site, self._report.step, seq)

    def _take_entries(self, rows: Int64, firsts: Int64, lasts: Int64) -> tuple[Int64, Int64, Moved]:
        """Takes entries [first, last) of each row over from the table.

        Returns (place of each entry's row in the call, its index in the row, what changed).
        """
        owner, place = repeat_ranges(lasts - firsts)
        at = firsts[owner] + place
        which = rows[owner]
        moved = self._shadow.set_entries(which, at, self._table.blocks[which, at])
        if len(moved.places):
            changed = which[moved.places]
            self._shadow.changed.mark(
                changed, self._report.site, self._report.step, self._shadow.seqs[changed]
            )
        return owner, at, moved

    def _allocated(self, blocks: Int32, seqs: Int64) -> None:
        """Blocks that have just been given out."""
        shadow, pool = self._shadow, self._pool
        if not len(blocks):
            return
        shared = blocks[shadow.references[blocks] != 1]
        if len(shared):
            block = int(shared[0])
            pending = block in shadow.copy_sources.tolist()
            self._report.fail(
                Misuse.PENDING_REUSE if pending else Misuse.HELD_REUSE,
                f"block {block} was given to sequence {seqs[blocks == block][0]}",
                block=block,
                seq=int(seqs[blocks == block][0]),
            )
        for block in blocks[shadow.leases[blocks] > 0].tolist():
            self._report.fail(
                Misuse.PENDING_REUSE, f"leased block {block} was given out", block=block
            )
        for block in blocks[pool.extents[blocks] > 0].tolist():
            self._report.fail(
                Misuse.BROKEN_INVARIANT, f"block {block} was given out with its name", block=block
            )
        shadow.generations[blocks] += 1
        shadow.filled[blocks] = shadow.spaces[blocks] = 0
        shadow.outdated[blocks] = shadow.to_seal[blocks] = shadow.to_verify[blocks] = False
        shadow.fresh[blocks] = True
        shadow.allocated.mark(blocks, self._report.site, self._report.step, seqs)

    def _copied(self, sources: Int32, copies: Int32, filled: Int64, seqs: Int64) -> None:
        shadow = self._shadow
        for i in np.flatnonzero(shadow.filled[sources] < filled).tolist():
            self._report.fail(
                Misuse.PAST_EXTENT,
                f"{filled[i]} slots of block {sources[i]} are to be copied",
                block=int(sources[i]),
                seq=int(seqs[i]),
            )
        for array in (shadow.tokens, shadow.prints, shadow.outdated):
            array[copies] = array[sources]
        shadow.filled[copies] = filled

    def _end_copies(self, rows: Int64) -> Int64:
        shadow = self._shadow
        copying = rows[shadow.copy_sources[rows] > 0]
        sources = shadow.copy_sources[copying]
        np.subtract.at(shadow.references, sources, 1)
        shadow.copy_sources[copying] = 0
        self._released(sources, shadow.seqs[copying])
        return sources

    def _cut(self, row: int, length: int) -> None:
        """The row is cut to `length` tokens, its reservation cancelled first."""
        shadow = self._shadow
        seq, had = int(shadow.seqs[row]), shadow.num_blocks(row)
        expected = shadow.blocks[row, :had].copy()
        sources = np.zeros(0, np.int64)
        if shadow.copy_sources[row]:
            sources = shadow.copy_sources[[row]]
            expected[int(shadow.lengths[row]) // self._size] = sources[0]
            np.subtract.at(shadow.references, sources, 1)
            shadow.copy_sources[row] = 0
        expected[-(-length // self._size) :] = NULL_BLOCK
        rows = np.array([row])
        _, _, moved = self._take_entries(rows, np.array([0]), np.array([had]))
        if not np.array_equal(shadow.blocks[row, :had], expected):
            self._checks.wrong_table([seq], f"{shadow.blocks[row, :had]}, not {expected}")
        shadow.end_reservations(rows)
        self._released(np.concatenate([moved.old, sources]), seq)
        self._checks.counts(np.concatenate([moved.old, moved.new, sources]))

    def _released(self, blocks: Int32 | Int64, seqs: Int64 | int) -> None:
        """Marks the blocks among `blocks` that have lost their last holder."""
        idle = self._shadow.references[blocks] == 0
        if np.count_nonzero(idle):
            who = seqs if isinstance(seqs, int) else seqs[idle]
            self._shadow.freed.mark(blocks[idle], self._report.site, self._report.step, who)

    def _published(self, rows: Int64, at: Int64, blocks: Int32 | None = None) -> None:
        """Notes what has got its name: who may find it, and that its K/V wants a checksum."""
        shadow = self._shadow
        blocks = shadow.blocks[rows, at] if blocks is None else blocks
        new = np.flatnonzero((self._pool.extents[blocks] > 0) & (shadow.spaces[blocks] == 0))
        if not len(new):
            return
        rows, at, blocks = rows[new], at[new], blocks[new]
        self._checks.published(blocks)
        shadow.spaces[blocks] = shadow.space_of(rows, at)
        shadow.outdated[blocks] |= shadow.outdated_rows[rows]
        shadow.to_seal[blocks] = True

    def _rows(self, seqs: Int64) -> Int64:
        rows = self._shadow.rows(seqs)
        for seq in seqs[self._shadow.seqs[rows] != seqs].tolist():
            text = f"sequence {seq} is closed, and a call with it was not refused"
            self._report.fail(Misuse.FREED_READ, text, seq=seq)
        return rows

    def _row(self, seq: SeqId) -> int:
        return int(self._rows(int_array([seq], "seq"))[0])
