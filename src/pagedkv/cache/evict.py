"""The order in which cached blocks are given up: least recently released first.

An append-only ring of (block, stamp). A block leaves by having its current stamp changed; its old
entry is skipped when it comes to the head. So release, hit and evict are vectorised, and nothing
is unlinked one by one.
"""

from __future__ import annotations

import numpy as np

from pagedkv.cache.types import Int32


class EvictionRing:
    """Cached blocks from oldest to newest. Block ids are 1..num_blocks."""

    def __init__(self, num_blocks: int) -> None:
        capacity = 2 * num_blocks + 64
        self._blocks = np.zeros(capacity, np.int32)
        self._stamps = np.zeros(capacity, np.int64)
        self._stamp_of = np.zeros(num_blocks + 1, np.int64)  # 0: not in the ring
        self._head = self._tail = 0
        self._clock = 1

    def append(self, blocks: Int32) -> None:
        """Adds blocks (none of them in the ring) as the newest, in the order given."""
        n = len(blocks)
        if self._tail + n > len(self._blocks):
            self._compact()
        stamps = np.arange(self._clock, self._clock + n)
        self._blocks[self._tail : self._tail + n] = blocks
        self._stamps[self._tail : self._tail + n] = stamps
        self._stamp_of[blocks] = stamps
        self._tail += n
        self._clock += n

    def discard(self, blocks: Int32) -> None:
        """Takes blocks out, wherever they stand."""
        self._stamp_of[blocks] = 0

    def take(self, k: int) -> Int32:
        """Removes and returns the oldest blocks, at most k."""
        taken: list[Int32] = []
        while k > 0 and self._head < self._tail:
            window = slice(self._head, min(self._tail, self._head + max(2 * k, 64)))
            blocks = self._blocks[window]
            live = np.flatnonzero(self._stamps[window] == self._stamp_of[blocks])[:k]
            enough = len(live) == k
            self._head = self._head + int(live[-1]) + 1 if enough else window.stop
            chosen = blocks[live]
            self._stamp_of[chosen] = 0
            taken.append(chosen.copy())
            k -= len(chosen)
        return np.concatenate(taken) if taken else np.zeros(0, np.int32)

    def order(self) -> Int32:
        """All blocks, oldest first, as a new array."""
        blocks = self._blocks[self._head : self._tail]
        live = self._stamps[self._head : self._tail] == self._stamp_of[blocks]
        order: Int32 = blocks[live]
        return order

    def _compact(self) -> None:
        live = self.order()
        n = len(live)
        self._blocks[:n] = live
        self._stamps[:n] = self._stamp_of[live]
        self._head, self._tail = 0, n
