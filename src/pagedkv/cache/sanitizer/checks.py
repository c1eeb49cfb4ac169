"""Comparing the manager with the shadow, and saying which misuse a difference is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from pagedkv.cache.errors import Misuse
from pagedkv.cache.sanitizer.report import Reporter
from pagedkv.cache.sanitizer.shadow import NOT_KNOWN, Moved, Shadow
from pagedkv.cache.types import NULL_BLOCK, Int32, Int64

if TYPE_CHECKING:
    from pagedkv.cache.manager import BlockManager


class Checks:
    """What must hold of rows, blocks and names. Every method raises SanitizerError, or returns."""

    def __init__(self, manager: BlockManager, shadow: Shadow, report: Reporter) -> None:
        self._manager, self._pool, self._size = manager, manager.pool, manager.block_size
        self._shadow, self._report = shadow, report

    def counts(self, blocks: Int32 | Int64) -> None:
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

    def leases(self, blocks: Int32) -> None:
        for block in blocks[self._pool.leases[blocks] != self._shadow.leases[blocks]].tolist():
            self._report.fail(
                Misuse.COUNT,
                f"block {block} has {self._pool.leases[block]} leases, "
                f"{self._shadow.leases[block]} are right",
                block=block,
            )

    def nothing_held(self) -> None:
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

    def exclusive(self, tails: Int32, seqs: Int64, starts: Int64, sources: Int32) -> None:
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

    def written(self, ids: Int64, rows: Int64, starts: Int64, counts: Int64) -> None:
        if not self._shadow.writes_reported:
            return
        shadow = self._shadow
        missing = counts > np.maximum(shadow.written[rows], 0)
        missing &= shadow.written[rows] != NOT_KNOWN
        for i in np.flatnonzero(missing).tolist():
            position = int(starts[i] + max(int(shadow.written[rows[i]]), 0))
            self._report.fail(
                Misuse.SLOT_NEVER,
                f"sequence {ids[i]} commits {counts[i]} tokens, position {position} was not "
                "written",
                block=int(shadow.blocks[rows[i], position // self._size]),
                seq=int(ids[i]),
            )

    def given_back(self, ids: Int64, rows: Int64, ends: Int64, owner: Int64, at: Int64) -> None:
        """Entries (row of owner, at) past the committed tokens are empty."""
        past = np.flatnonzero(at >= -(-ends // self._size)[owner])
        blocks = self._shadow.blocks[rows[owner[past]], at[past]]
        for i in past[blocks != NULL_BLOCK].tolist():
            self.wrong_table(
                ids[owner[i : i + 1]], f"entry {at[i]} kept, {ends[owner[i]]} tokens are committed"
            )

    def switched(self, ids: Int64, at: Int64, ends: Int64, moved: Moved) -> None:
        """Entries that `commit` changed: surplus ones go, full ones move to an equal block."""
        shadow = self._shadow
        gone = moved.new == NULL_BLOCK
        wrong = np.where(gone, at < -(-ends // self._size), at >= ends // self._size)
        for i in np.flatnonzero(wrong).tolist():
            self.wrong_table(ids[i : i + 1], f"block {moved.new[i]} for {moved.old[i]}")
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

    def found(self, seq: int, row: int, length: int, tokens: Int32) -> None:
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

    def published(self, blocks: Int32 | Int64) -> None:
        """Named blocks hold, as far as they are named, the tokens that their names are made of."""
        shadow, extents = self._shadow, self._pool.extents[blocks]
        for i in np.flatnonzero(extents > shadow.filled[blocks]).tolist():
            self._report.fail(
                Misuse.WRONG_HIT,
                f"block {blocks[i]} is published with {extents[i]} slots, "
                f"{shadow.filled[blocks[i]]} are filled",
                block=int(blocks[i]),
            )
        differs = self._manager.contents[blocks] != shadow.tokens[blocks]
        differs &= np.arange(self._size) < extents[:, None]
        for block in blocks[differs.any(axis=1)].tolist():
            self._report.fail(
                Misuse.WRONG_HIT,
                f"block {block} is published under tokens that were not committed to it",
                block=block,
            )

    def wrong_table(self, seqs: Sequence[int] | Int64, what: str) -> NoReturn:
        seq = int(seqs[0])
        self._report.fail(Misuse.WRONG_TABLE, f"sequence {seq} of the call got {what}", seq=seq)
