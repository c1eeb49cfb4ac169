"""The order in which cached blocks are given up.

Two rings, each least recently released first. A block enters *probation*; one that has been used
again goes to the *protected* ring, which holds at most a quarter of the pool and gives its oldest
back to probation. Blocks are evicted from probation while there are any: prompts that come once
pass through it and leave the protected ones alone. So that a prefix which comes back too late is
known too, the digests of evicted names are remembered for a while: computed again, it counts as
used again. (The segmented LRU of Karedla et al., IEEE Computer 1994, with the ghost queue of
Johnson and Shasha's 2Q, VLDB 1994.)

A ring is append-only; the number of an entry is its stamp. A block leaves by having its
current stamp changed; its old entry is skipped when it comes to the head. So release, hit and
evict are vectorised, and nothing is unlinked one by one.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from pagedkv.cache.types import Int32, Mask

EVICTION_POLICIES = ("slru", "lru")
# Smaller pools are plain LRU: no prompt is small beside them, so there is no scan to resist.
SCAN_RESISTANT_FROM = 64
PROTECTED_SHARE = 4  # the protected ring holds one part in so many of the pool
GHOSTS_A_BLOCK = 2  # names remembered for each block of the pool


class EvictionRing:
    """Cached blocks from oldest to newest. Block ids are 1..num_blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._capacity = 2 * num_blocks + 64
        self._blocks = np.zeros(self._capacity, np.int32)
        self._stamp_of = np.zeros(num_blocks + 1, np.int64)  # 0: not in the ring
        # Entries head <= i < tail, entry i at place i % capacity. Entry i has the stamp i.
        self._head = self._tail = 1
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def append(self, blocks: Int32) -> None:
        """Adds blocks (none of them in the ring) as the newest, in the order given."""
        n = len(blocks)
        if self._tail + n - self._head > self._capacity:
            self._compact()
        stamps = np.arange(self._tail, self._tail + n)
        self._blocks[stamps % self._capacity] = blocks
        self._stamp_of[blocks] = stamps
        self._tail += n
        self._live += n

    def discard(self, blocks: Int32) -> None:
        """Takes distinct blocks out, wherever they stand; those that are not here are ignored."""
        self._live -= int(np.count_nonzero(self._stamp_of[blocks]))
        self._stamp_of[blocks] = 0

    def take(self, k: int) -> Int32:
        """Removes and returns the oldest blocks, at most k."""
        taken: list[Int32] = []
        while k > 0 and self._head < self._tail:
            end = min(self._tail, self._head + max(2 * k, 64))
            entries = np.arange(self._head, end)
            blocks = self._blocks[entries % self._capacity]
            live = np.flatnonzero(entries == self._stamp_of[blocks])[:k]
            self._head = int(entries[live[-1]]) + 1 if len(live) == k else end
            chosen = blocks[live]
            self._stamp_of[chosen] = 0
            taken.append(chosen)
            k -= len(chosen)
            self._live -= len(chosen)
        if len(taken) == 1:
            return taken[0]
        return np.concatenate(taken) if taken else np.zeros(0, np.int32)

    def order(self) -> Int32:
        """All blocks, oldest first, as a new array."""
        entries = np.arange(self._head, self._tail)
        blocks = self._blocks[entries % self._capacity]
        order: Int32 = blocks[entries == self._stamp_of[blocks]]
        return order

    def _compact(self) -> None:
        """Drops the dead entries: afterwards at most half of the ring is in use."""
        live = self.order()
        self._head, self._live = self._tail, 0
        self.append(live)


class EvictionOrder:
    """Cached blocks in the order in which they are given up, and what is remembered of the gone.

    `hot[block]`: the block was used again since it got its name. Ancestors of a hot block are hot,
    so that in either ring a block stands before its parent: chains leave from the tail.
    policy: one of EVICTION_POLICIES. With "lru" there is one ring and nothing is remembered.
    """

    def __init__(self, num_blocks: int, policy: str = "slru") -> None:
        self.resistant = policy == "slru" and num_blocks >= SCAN_RESISTANT_FROM
        self._limit = num_blocks // PROTECTED_SHARE
        self._max_ghosts = num_blocks * GHOSTS_A_BLOCK
        self.probation = EvictionRing(num_blocks)
        self.protected = EvictionRing(num_blocks)
        self.hot = np.zeros(num_blocks + 1, np.bool_)
        self.ghosts: OrderedDict[int, None] = OrderedDict()  # digests, oldest first

    def append(self, blocks: Int32) -> None:
        """Adds blocks (in neither ring) as the newest, in the order given."""
        if not self.resistant:
            self.probation.append(blocks)
            return
        hot: Mask = self.hot[blocks]
        self.probation.append(blocks[~hot])
        self.protected.append(blocks[hot])
        surplus = len(self.protected) - self._limit
        if surplus > 0:
            self.probation.append(self.protected.take(surplus))

    def discard(self, blocks: Int32) -> None:
        """Takes distinct blocks out, wherever they stand."""
        self.probation.discard(blocks)
        if len(self.protected):
            self.protected.discard(blocks)

    def take(self, k: int) -> Int32:
        """Removes and returns the first blocks to go, at most k."""
        taken = self.probation.take(k)
        if len(taken) == k or not len(self.protected):
            return taken
        return np.concatenate([taken, self.protected.take(k - len(taken))])

    def order(self) -> Int32:
        """All blocks, the first to go first, as a new array."""
        return np.concatenate([self.probation.order(), self.protected.order()])

    def remember(self, digests: list[int]) -> None:
        """Digests of the names of evicted blocks."""
        if not self.resistant:
            return
        for digest in digests:
            self.ghosts.pop(digest, None)
            self.ghosts[digest] = None
        while len(self.ghosts) > self._max_ghosts:
            self.ghosts.popitem(last=False)

    def recall(self, digest: int) -> bool:
        """Whether a name was evicted lately; it is forgotten then."""
        if digest not in self.ghosts:
            return False
        del self.ghosts[digest]
        return True
