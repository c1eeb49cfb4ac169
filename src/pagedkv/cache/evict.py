"""The order in which cached blocks are given up: least recently released first.

An append-only ring of blocks; the number of an entry is its stamp. A block leaves by having its
current stamp changed; its old entry is skipped when it comes to the head. So release, hit and
evict are vectorised, and nothing is unlinked one by one.
"""

from __future__ import annotations

import numpy as np

from pagedkv.cache.types import Int32


class EvictionRing:
    """Cached blocks from oldest to newest. Block ids are 1..num_blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._capacity = 2 * num_blocks + 64
        self._blocks = np.zeros(self._capacity, np.int32)
        self._stamp_of = np.zeros(num_blocks + 1, np.int64)  # 0: not in the ring
        # Entries head <= i < tail, entry i at place i % capacity. Entry i has the stamp i.
        self._head = self._tail = 1

    def append(self, blocks: Int32) -> None:
        """Adds blocks (none of them in the ring) as the newest, in the order given."""
        n = len(blocks)
        if self._tail + n - self._head > self._capacity:
            self._compact()
        stamps = np.arange(self._tail, self._tail + n)
        self._blocks[stamps % self._capacity] = blocks
        self._stamp_of[blocks] = stamps
        self._tail += n

    def discard(self, blocks: Int32) -> None:
        """Takes blocks out, wherever they stand."""
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
        self._head = self._tail
        self.append(live)
