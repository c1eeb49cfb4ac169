"""All blocks at a glance, as arrays: for pictures of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.cache.table import repeat_ranges
from pagedkv.cache.types import Int32, Int64, SeqId

if TYPE_CHECKING:
    from pagedkv.cache.manager import BlockManager

# States of a block by their number in a Survey; shared: held more than once.
STATES = ("free", "cached", "held", "shared", "draining")
FREE, CACHED, HELD, SHARED, DRAINING = range(len(STATES))
NOBODY = -1


class Survey(NamedTuple):
    """Arrays over the blocks 1..num_blocks, entry i for block i + 1; the caller's.

    states: uint8. counts: int32 [N], see `BlockManager.refcount`. filled: int32 [N], slots with a
    token: committed by a holder, or published. owners: int32 [N], place of the first sequence that
    holds the block among those asked about, or NOBODY.
    """

    states: npt.NDArray[np.uint8]
    counts: Int32
    filled: Int32
    owners: Int32


def survey(manager: BlockManager, seqs: Sequence[SeqId]) -> Survey:
    """The pool as it is. seqs: whose blocks are looked up. O(num_blocks + entries of the tables).

    KeyError for a sequence that is not open, ValueError for one that is named twice.
    """
    pool, table, size = manager.pool, manager.table, manager.block_size
    rows = table.find(seqs)
    counts, extents = pool.counts, pool.extents
    states = np.where(extents > 0, np.uint8(CACHED), np.uint8(FREE))
    states[pool.leases > 0] = DRAINING
    states[counts > 0] = HELD
    states[counts > 1] = SHARED
    # Held blocks are full, but for those in which every holder ends.
    filled = np.where(counts > 0, size, extents)
    lengths = table.lengths[rows]
    used = -(-(lengths + np.maximum(table.reserved[rows], 0)) // size)
    full = lengths // size
    row, part = repeat_ranges(used - full)
    place = full[row] + part
    slots = np.maximum(lengths[row] - place * size, 0)
    _note_parts(filled, counts, extents, table.blocks[rows[row], place], slots)
    owners = np.full(manager.num_blocks + 1, NOBODY, np.int32)
    for i in range(len(rows) - 1, -1, -1):  # so that the first holder is written last
        owners[table.blocks[rows[i], : used[i]]] = i
    return Survey(states[1:], counts[1:].copy(), filled[1:].astype(np.int32), owners[1:])


def _note_parts(
    filled: Int64 | Int32, counts: Int32, extents: Int32, blocks: Int32, slots: Int64
) -> None:
    """Blocks that hold `slots` tokens for one of their holders, less than a block, if any.

    A block that has more holders than are named here is full for another one.
    """
    mentions = np.zeros_like(counts)
    np.add.at(mentions, blocks, 1)
    most = extents.astype(np.int64)
    np.maximum.at(most, blocks, slots)
    alone = blocks[mentions[blocks] == counts[blocks]]
    filled[alone] = most[alone]
