"""The write rule: where a call's new tokens go, decided for the whole call before anything moves.

A writer is a row that adds tokens while its last block is partly filled. It writes in place when
nothing else can see the block beyond its own length; otherwise the filled slots are copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedkv.cache.pool import Pool
from pagedkv.cache.table import BlockTable
from pagedkv.cache.types import Int64, Mask


@dataclass(slots=True)
class WritePlan:
    """What `reserve` will do. Arrays have one entry a row of the call.

    Interval map of a row of length n that reserves k (B = block size):

        [0, n)                committed
        [n - n % B, n)        copied to a new block first, where `copies`
        [n, n + k)            reserved; the last `fresh` blocks of it are new
    """

    rows: Int64
    starts: Int64  # committed length
    counts: Int64  # k
    owned: Int64  # blocks in the row now
    fresh: Int64  # blocks to append
    copies: Mask
    withdraw: list[int]  # blocks whose names go because a writer takes them over
    overwritable: list[
        tuple[int, int]
    ]  # (place in the call, block): may lose its name to save a copy

    demand: int  # blocks the call takes from free and cached

    def fit(self, available: int) -> None:
        """Saves copies by withdrawing names, in call order, only as many as are needed."""
        for place, block in self.overwritable:
            if self.demand <= available:
                return
            self.copies[place] = False
            self.withdraw.append(block)
            self.demand -= 1


def plan_writes(pool: Pool, rows: BlockTable, which: Int64, counts: Int64) -> WritePlan:
    """Applies points 1 and 2 of the write rule; `WritePlan.fit` is point 3. Changes nothing."""
    block_size = rows.block_size
    starts = rows.lengths[which]
    index, fill = np.divmod(starts, block_size)
    owned = index + (fill > 0)
    fresh = -(-(starts + counts) // block_size) - owned
    copies = np.zeros(len(which), np.bool_)
    plan = WritePlan(which, starts, counts, owned, fresh, copies, [], [], int(fresh.sum()))

    writing = ((fill > 0) & (counts > 0)).nonzero()[0]
    tails = rows.blocks[which[writing], index[writing]]
    seen = (pool.counts[tails] > 1) | (pool.leases[tails] > 0) | (pool.extents[tails] > 0)
    if not np.count_nonzero(seen):
        return plan
    writers: dict[int, list[int]] = {}
    for place, block in zip(writing[seen].tolist(), tails[seen].tolist(), strict=True):
        writers.setdefault(block, []).append(place)
    for block, places in writers.items():
        copies[places] = True
        if pool.leases[block] or pool.counts[block] != len(places):
            continue  # somebody else sees it: a holder, a reader of copies, a lease
        heir = max(places, key=lambda place: (fill[place], place))
        extent = pool.extents[block]
        if extent > fill[heir]:
            plan.overwritable.append((heir, block))
            continue
        copies[heir] = False
        if extent:
            plan.withdraw.append(block)
    plan.overwritable.sort()
    plan.demand += int(np.count_nonzero(copies))
    return plan
