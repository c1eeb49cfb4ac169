"""One contiguous extent a request: the allocator that paging replaces, kept as a baseline."""

from __future__ import annotations

import bisect
from dataclasses import dataclass


@dataclass(slots=True)
class Extent:
    """Slots [start, start + size) of the pool."""

    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


class FirstFit:
    """Extents of a pool of `num_slots` slots, each put into the lowest hole that takes it.

    A hole is a maximal run of free slots. `compact` slides the extents together; what is copied is
    theirs to count. Sizes are in slots. Not thread-safe.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._extents: dict[int, Extent] = {}  # by the caller's key
        self._holes: list[tuple[int, int]] = [(0, num_slots)]  # (start, size), ascending

    @property
    def free_slots(self) -> int:
        return sum(size for _, size in self._holes)

    @property
    def holes(self) -> list[int]:
        """Sizes of the holes, in the order of the pool."""
        return [size for _, size in self._holes]

    def allocate(self, key: int, size: int) -> bool:
        """Whether there was a hole for `size` slots; if so they are `key`'s now."""
        for place, (start, hole) in enumerate(self._holes):
            if hole >= size:
                self._extents[key] = Extent(start, size)
                if hole == size:
                    del self._holes[place]
                else:
                    self._holes[place] = start + size, hole - size
                return True
        return False

    def free(self, key: int) -> None:
        """Gives an extent back; holes that touch become one. KeyError for an unknown key."""
        extent = self._extents.pop(key)
        start, end = extent.start, extent.end
        place = bisect.bisect(self._holes, (start, 0))
        if place < len(self._holes) and self._holes[place][0] == end:
            end += self._holes.pop(place)[1]
        if place and sum(self._holes[place - 1]) == start:
            place -= 1
            start = self._holes.pop(place)[0]
        self._holes.insert(place, (start, end - start))

    def compact(self) -> list[int]:
        """Moves all extents to the front, in order; returns the keys of those that moved."""
        moved, start = [], 0
        for key, extent in sorted(self._extents.items(), key=lambda item: item[1].start):
            if extent.start != start:
                moved.append(key)
                extent.start = start
            start += extent.size
        self._holes = [(start, self.num_slots - start)] if start < self.num_slots else []
        return moved
