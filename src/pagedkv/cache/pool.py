"""Who holds which block. The only file that changes a reference count.

A block is in exactly one of four states:

    held      count > 0
    draining  count 0, leased: being copied out, not available
    cached    count 0, not leased, named: findable, evictable
    free      count 0, not leased, no name

`change` moves blocks between held and the rest; a lease, and giving or taking a name, move the
blocks that nobody holds.
"""

from __future__ import annotations

import numpy as np

from pagedkv.cache.evict import EvictionOrder
from pagedkv.cache.types import NUM_GROUPS, Int32, Mask


class Pool:
    """Counts, leases, published extents, the free stack and the eviction order.

    Arrays are indexed by block id, 0..num_blocks; entry 0 (the null block) is never touched.
    """

    def __init__(self, num_blocks: int, eviction: str = "slru") -> None:
        self.num_blocks = num_blocks
        self.group_counts = np.zeros((NUM_GROUPS, num_blocks + 1), np.int32)
        self.counts = self.group_counts[0]
        self.leases = np.zeros(num_blocks + 1, np.int32)
        self.extents = np.zeros(num_blocks + 1, np.int32)  # published slots; 0: no name
        self.eviction = EvictionOrder(num_blocks, eviction)
        # A stack, lowest id on top, so that a fresh pool hands out adjacent blocks.
        self._free = np.arange(num_blocks, 0, -1, dtype=np.int32)
        self.num_free = num_blocks
        self.num_cached = 0
        self.num_draining = 0
        self.num_evicted = 0  # since the start; no part of the state
        self._last_seen = np.zeros(num_blocks + 1, np.int64)  # scratch of `_last_mentions`

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached - self.num_draining

    @property
    def num_available(self) -> int:
        """Blocks that can be had without taking one from a holder."""
        return self.num_free + self.num_cached

    def change(self, blocks: Int32, delta: int, allocated: bool = False) -> None:
        """Adds delta (+1 or -1) to the count of each block; a block may be named several times.

        Blocks that lose their last holder become draining, cached (newest in the order given) or
        free; blocks that gain their first one leave that state. `allocated`: distinct blocks that
        `allocate` has just taken off the free stack.
        """
        if len(blocks) == 0:
            return
        if allocated:
            self.counts[blocks] += delta
            return
        if delta > 0:
            idle = self._last_mentions(blocks[self.counts[blocks] == 0])
            np.add.at(self.counts, blocks, delta)
            leased = self.leases[idle] > 0
            cached = idle[~leased & (self.extents[idle] > 0)]
            self.eviction.discard(cached)
            self.num_cached -= len(cached)
            self.num_draining -= int(leased.sum())
        else:
            np.add.at(self.counts, blocks, delta)
            self._park(self._last_mentions(blocks[self.counts[blocks] == 0]))

    def allocate(self, n: int) -> Int32:
        """Takes n free blocks, held once each. The caller has made sure that n are free."""
        blocks = self._free[self.num_free - n : self.num_free][::-1].copy()
        self.num_free -= n
        self.change(blocks, +1, allocated=True)
        return blocks

    def use_again(self, blocks: Int32) -> None:
        """Notes that named blocks, with all their ancestors, have been of use once more."""
        self.eviction.hot[blocks] = True

    def take_oldest(self, k: int) -> Int32:
        """Takes up to k cached blocks out of the eviction order; the caller withdraws their names.

        They count as cached until `unname`.
        """
        taken = self.eviction.take(k)
        self.num_evicted += len(taken)
        return taken

    def name(self, blocks: Int32, extent: int) -> None:
        """Records that held blocks are published up to `extent` slots."""
        self.extents[blocks] = extent

    def unname(self, blocks: Int32) -> None:
        """Takes names away (each block once); blocks that nobody holds or leases become free."""
        self.extents[blocks] = 0
        self.eviction.hot[blocks] = False
        cached = blocks[(self.counts[blocks] == 0) & (self.leases[blocks] == 0)]
        self.eviction.discard(cached)
        self.num_cached -= len(cached)
        self._push_free(cached)

    def lease(self, blocks: Int32) -> None:
        """Forbids reuse of held, cached or draining blocks, each named once."""
        first = blocks[(self.counts[blocks] == 0) & (self.leases[blocks] == 0)]
        self.leases[blocks] += 1
        self.eviction.discard(first)
        self.num_cached -= len(first)
        self.num_draining += len(first)

    def end_lease(self, blocks: Int32) -> None:
        """Ends one lease of each block; those that nobody holds become cached or free."""
        self.leases[blocks] -= 1
        last = blocks[(self.counts[blocks] == 0) & (self.leases[blocks] == 0)]
        self.num_draining -= len(last)
        self._park(last)

    def is_cached(self, blocks: Int32) -> Mask:
        mask: Mask = (
            (self.counts[blocks] == 0) & (self.leases[blocks] == 0) & (self.extents[blocks] > 0)
        )
        return mask

    def refresh(self, blocks: Int32) -> None:
        """Makes the cached ones among distinct blocks the newest, in the order given."""
        cached = blocks[self.is_cached(blocks)]
        self.eviction.discard(cached)
        self.eviction.append(cached)

    def is_free(self, blocks: Int32) -> Mask:
        mask: Mask = (
            (self.counts[blocks] == 0) & (self.leases[blocks] == 0) & (self.extents[blocks] == 0)
        )
        return mask

    def free_stack(self) -> Int32:
        """The free blocks, next to be allocated last. A view."""
        return self._free[: self.num_free]

    def load(
        self,
        counts: Int32,
        leases: Int32,
        extents: Int32,
        hot: Mask,
        free_stack: Int32,
        probation: Int32,
        protected: Int32,
    ) -> None:
        """Takes over a saved state."""
        self.counts[:] = counts
        self.leases[:] = leases
        self.extents[:] = extents
        self.num_free = len(free_stack)
        self._free[: self.num_free] = free_stack
        self.eviction.hot[:] = hot
        self.eviction.probation.append(probation)
        self.eviction.protected.append(protected)
        self.num_cached = len(probation) + len(protected)
        self.num_draining = int(np.count_nonzero((counts == 0) & (leases > 0)))

    def _park(self, idle: Int32) -> None:
        """Sorts blocks that have just lost their last holder or lease into their new state."""
        if len(idle) == 0:
            return
        leased = self.leases[idle] > 0
        named = self.extents[idle] > 0
        self.num_draining += int(leased.sum())
        cached = idle[named & ~leased]
        self.eviction.append(cached)
        self.num_cached += len(cached)
        self._push_free(idle[~named & ~leased])

    def _push_free(self, blocks: Int32) -> None:
        self._free[self.num_free : self.num_free + len(blocks)] = blocks
        self.num_free += len(blocks)

    def _last_mentions(self, blocks: Int32) -> Int32:
        """The distinct blocks, in the order of their last mention."""
        if len(blocks) < 2:
            return blocks
        places = np.arange(len(blocks))
        self._last_seen[blocks] = places  # of repeated indices numpy keeps the last
        last: Int32 = blocks[self._last_seen[blocks] == places]
        return last
