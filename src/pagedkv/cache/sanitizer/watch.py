"""What every verb must have done to rows, blocks and slots.

One method a verb, under the verb's own name. It is called after the verb with the verb's result and
arguments, compares what has become of the block table and the counts with what the verb promises,
and brings the shadow up to date.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from pagedkv.cache.errors import Misuse
from pagedkv.cache.lease import Lease
from pagedkv.cache.sanitizer.report import Reporter
from pagedkv.cache.sanitizer.shadow import NOT_REPORTED, Moved, Shadow
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
        self.writes_reported = False  # an engine tells of its writes: then none may be missing

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
        self._compare_counts(blocks)
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
        self, result: Reservation, seqs: Sequence[SeqId], counts: Sequence[int] | Int64
    ) -> None:
        shadow, size = self._shadow, self._size
        ids, wanted = int_array(seqs, "seqs"), int_array(counts, "counts")
        rows = shadow.rows(ids)
        starts = shadow.lengths[rows]
        index, fill = np.divmod(starts, size)
        owner, _, moved = self._take_entries(rows, index, -(-(starts + wanted) // size))
        writers = owner[moved.places]
        copying = np.flatnonzero(moved.old)
        sources, copies, readers = moved.old[copying], moved.new[copying], writers[copying]
        shadow.copy_sources[rows[readers]] = sources
        np.add.at(shadow.references, sources, 1)
        self._allocated(moved.new, ids[writers])
        self._copied(sources, copies, fill[readers], ids[readers])
        writing = np.flatnonzero((fill > 0) & (wanted > 0))
        tails = shadow.blocks[rows[writing], index[writing]]
        self._check_exclusive(tails, ids[writing], starts[writing], sources)
        shadow.filled[tails] = np.minimum(shadow.filled[tails], fill[writing])
        shadow.spaces[tails] = 0  # a name that a tail had is gone
        shadow.reserved[rows], shadow.written[rows] = wanted, NOT_REPORTED
        shadow.copied[rows] = False
        self._compare_counts(np.concatenate([moved.new, sources, tails]))
        expected = np.stack([sources, copies, fill[readers].astype(np.int32)], axis=1)
        if not np.array_equal(result.copies, expected):
            self._wrong_table(ids, f"copies {result.copies.tolist()}, not {expected.tolist()}")
        if not np.array_equal(result.slots, shadow.slots(rows, starts, wanted)):
            self._wrong_table(ids, "slots that its table does not lead to")

    def commit(self, result: None, seqs: Sequence[SeqId], tokens: Sequence[Tokens]) -> None:
        shadow, size = self._shadow, self._size
        ids = int_array(seqs, "seqs")
        rows = shadow.rows(ids)
        flat, counts = flatten_tokens(tokens, len(ids))
        starts = shadow.lengths[rows]
        index, ends = starts // size, starts + counts
        self._check_written(ids, rows, starts, counts)
        shadow.fill(rows, starts, flat, counts)
        sources = self._end_copies(rows)
        owner, at, moved = self._take_entries(
            rows, index, -(-(starts + shadow.reserved[rows]) // size)
        )
        owners = owner[moved.places]
        self._check_switched(ids[owners], at[moved.places], ends[owners], moved)
        shadow.lengths[rows], shadow.reserved[rows] = ends, 0
        self._released(moved.old, ids[owners])
        self._compare_counts(np.concatenate([moved.old, moved.new, sources]))
        full = np.flatnonzero(at < (ends // size)[owner])
        if len(full):
            self._published(rows[owner[full]], at[full])

    def cancel(self, result: None, seqs: Sequence[SeqId]) -> None:
        for row in self._shadow.rows(int_array(seqs, "seqs")).tolist():
            self._cut(row, int(self._shadow.lengths[row]))

    def fork(self, result: tuple[SeqId, ...], seq: SeqId, n: int = 1) -> None:
        shadow = self._shadow
        row = seq % shadow.max_seqs
        blocks = shadow.blocks[row, : shadow.num_blocks(row)].copy()
        for child in result:
            at = child % shadow.max_seqs
            self._hold(at, child, self._table.blocks[at, : len(blocks)])
            if not np.array_equal(shadow.blocks[at, : len(blocks)], blocks):
                self._wrong_table([child], f"a table that is not that of sequence {seq}")
            for array in (shadow.lengths, shadow.public, shadow.row_spaces, shadow.outdated_rows):
                array[at] = array[row]
        self._compare_counts(blocks)

    def truncate(self, result: None, seq: SeqId, n: int) -> None:
        shadow, row = self._shadow, seq % self._shadow.max_seqs
        self._cut(row, n)
        shadow.lengths[row] = n
        shadow.public[row] = min(int(shadow.public[row]), n)
        shadow.outdated_rows[row] &= n > 0

    def close(self, result: None, seq: SeqId) -> None:
        shadow, row = self._shadow, seq % self._shadow.max_seqs
        at, fill = divmod(int(shadow.lengths[row]), self._size)
        tail = int(shadow.copy_sources[row] or shadow.blocks[row, at]) if fill else NULL_BLOCK
        self._cut(row, 0)
        if self._pool.extents[tail] and not shadow.spaces[tail]:
            self._published(np.array([row]), np.array([at]), np.array([tail]))
        shadow.seqs[row] = shadow.lengths[row] = shadow.public[row] = 0
        shadow.outdated_rows[row] = False
        shadow.closed.mark(np.array([row]), self._report.site, self._report.step, seq)
        if self._manager.num_open_sequences == 0:
            self.check_nothing_held()

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
        self._compare_leases(result.blocks)

    def end_lease(self, result: None, lease_id: int) -> None:
        ids = self.leases.pop(lease_id)
        self._shadow.leases[ids] -= 1
        self._compare_leases(ids)

    def check_nothing_held(self) -> None:
        """No sequence is open, so no block may be held."""
        wrong = np.flatnonzero((self._shadow.references != 0) | (self._pool.counts != 0))
        if len(wrong):
            block = int(wrong[0])
            self._report.fail(
                Misuse.LEAK,
                f"no sequence is open, {len(wrong)} blocks are held, block {block} "
                f"with a count of {self._pool.counts[block]}",
                block=block,
            )

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
            self._check_found(seq, row, length, tokens)

    def _hold(self, row: int, seq: int, blocks: Int32) -> None:
        """A new row with blocks that were there already."""
        shadow = self._shadow
        shadow.seqs[row] = seq
        shadow.reserved[row] = shadow.copy_sources[row] = 0
        shadow.set_entries(np.full(len(blocks), row), np.arange(len(blocks)), blocks)
        for trail in (shadow.opened, shadow.changed):
            trail.mark(np.array([row]), self._report.site, self._report.step, seq)

    def _check_found(self, seq: int, row: int, length: int, tokens: Int32) -> None:
        """The tokens found are the tokens asked for, and may be found by who asked."""
        shadow, fail = self._shadow, self._report.fail
        blocks = shadow.blocks[row, : -(-length // self._size)]
        if length >= len(tokens):
            text = f"{length} of {len(tokens)} tokens were found: one is left to compute at least"
            fail(Misuse.WRONG_HIT, text, seq=seq)
        one, zero = np.array([row]), np.array([0])
        wanted = shadow.expected_prints(one, zero, tokens[:length], np.array([length]))
        there = shadow.prints[blocks].reshape(-1)[:length]
        needed = np.minimum(length - np.arange(len(blocks)) * self._size, self._size)
        wrong_content = shadow.filled[blocks] < needed
        wrong_content[np.flatnonzero(there != wanted) // self._size] = True
        at = np.arange(len(blocks))
        spaces = shadow.spaces[blocks]
        for wrong, why in (
            (at[wrong_content], "does not hold the tokens of the prompt"),
            (
                at[(spaces != shadow.space_of(np.full(len(at), row), at)) & (spaces > 0)],
                "was computed for another namespace or other extra bytes",
            ),
            (at[shadow.outdated[blocks]], "was computed before the cache was reset"),
        ):
            if len(wrong):
                block = int(blocks[wrong[0]])
                fail(Misuse.WRONG_HIT, f"block {block} {why}", block=block, seq=seq)
        shadow.to_verify[blocks] = True

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

    def _check_exclusive(self, tails: Int32, seqs: Int64, starts: Int64, sources: Int32) -> None:
        """Blocks that sequences are to write into; `sources`: what the call copies from.

        The longest of several writers may write in place, behind the slots that the others copy.
        """
        shadow = self._shadow
        seen = (shadow.references[tails] != 1) | (shadow.leases[tails] > 0)
        seen |= self._pool.extents[tails] > 0
        if not np.count_nonzero(seen):
            return
        others = shadow.references[tails] - 1 - (sources == tails[:, None]).sum(axis=1)
        seen = (others != 0) | (shadow.leases[tails] > 0) | (self._pool.extents[tails] > 0)
        for i in np.flatnonzero(seen).tolist():
            self._report.fail(
                Misuse.SHARED_WRITE,
                f"sequence {seqs[i]} is to write position {starts[i]} into block {tails[i]}, "
                f"which has {shadow.references[tails[i]]} holders, {shadow.leases[tails[i]]} "
                f"leases and {self._pool.extents[tails[i]]} published slots",
                block=int(tails[i]),
                seq=int(seqs[i]),
            )

    def _check_written(self, ids: Int64, rows: Int64, starts: Int64, counts: Int64) -> None:
        if not self.writes_reported:
            return
        shadow = self._shadow
        for i in np.flatnonzero(counts > np.maximum(shadow.written[rows], 0)).tolist():
            position = int(starts[i] + max(int(shadow.written[rows[i]]), 0))
            self._report.fail(
                Misuse.SLOT_NEVER,
                f"sequence {ids[i]} commits {counts[i]} tokens, position {position} was not "
                "written",
                block=int(shadow.blocks[rows[i], position // self._size]),
                seq=int(ids[i]),
            )

    def _check_switched(self, ids: Int64, at: Int64, ends: Int64, moved: Moved) -> None:
        """Entries that `commit` changed: surplus ones go, full ones move to an equal block."""
        shadow = self._shadow
        gone = moved.new == NULL_BLOCK
        wrong = np.where(gone, at < -(-ends // self._size), at >= ends // self._size)
        for i in np.flatnonzero(wrong).tolist():
            self._wrong_table(ids[i : i + 1], f"block {moved.new[i]} for {moved.old[i]}")
        last = self._size - 1
        differs = (shadow.prints[moved.old, last] != shadow.prints[moved.new, last]) | (
            shadow.filled[moved.new] < self._size
        )
        for i in np.flatnonzero(differs & ~gone).tolist():
            self._report.fail(
                Misuse.WRONG_HIT,
                f"block {moved.old[i]} was replaced by block {moved.new[i]}, which holds "
                "another content",
                block=int(moved.new[i]),
                seq=int(ids[i]),
            )

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
            self._wrong_table([seq], f"{shadow.blocks[row, :had]}, not {expected}")
        shadow.reserved[row] = 0
        self._released(np.concatenate([moved.old, sources]), seq)
        self._compare_counts(np.concatenate([moved.old, moved.new, sources]))

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
        new = (self._pool.extents[blocks] > 0) & (shadow.spaces[blocks] == 0)
        rows, at, blocks = rows[new], at[new], blocks[new]
        shadow.spaces[blocks] = shadow.space_of(rows, at)
        shadow.outdated[blocks] |= shadow.outdated_rows[rows]
        shadow.to_seal[blocks] = True

    def _compare_counts(self, blocks: Int32 | Int64) -> None:
        shadow, pool = self._shadow, self._pool
        wrong = blocks[(pool.counts[blocks] != shadow.references[blocks]) & (blocks > 0)]
        if not len(wrong):
            return
        block = int(wrong[0])
        counted, held = int(pool.counts[block]), int(shadow.references[block])
        kind = Misuse.COUNT
        if not held:
            kind = Misuse.DOUBLE_FREE if counted < 0 else Misuse.LEAK
        self._report.fail(
            kind, f"block {block} is counted {counted} times, {held} are right", block=block
        )

    def _compare_leases(self, blocks: Int32) -> None:
        for block in blocks[self._pool.leases[blocks] != self._shadow.leases[blocks]].tolist():
            self._report.fail(
                Misuse.COUNT,
                f"block {block} has {self._pool.leases[block]} leases, "
                f"{self._shadow.leases[block]} are right",
                block=block,
            )

    def _wrong_table(self, seqs: Sequence[int] | Int64, what: str) -> NoReturn:
        seq = int(seqs[0])
        self._report.fail(Misuse.WRONG_TABLE, f"sequence {seq} of the call got {what}", seq=seq)
