"""Byte strings kept in order: a list of short sorted runs.

An insertion moves at most one run, so it costs about a microsecond at any size, and the whole
keeps one list for some hundreds of keys.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

_RUN = 512


class SortedKeys:
    """A sorted set of non-empty byte strings."""

    def __init__(self) -> None:
        self._runs: list[list[bytes]] = [[]]
        self._floors: list[bytes] = [b""]  # _floors[i] <= every key of run i < _floors[i + 1]

    def __iter__(self) -> Iterator[bytes]:
        for run in self._runs:
            yield from run

    def add(self, key: bytes) -> None:
        at = bisect_right(self._floors, key) - 1
        run = self._runs[at]
        insort(run, key)
        if len(run) > _RUN:
            half = len(run) // 2
            self._runs[at : at + 1] = [run[:half], run[half:]]
            self._floors.insert(at + 1, run[half])

    def remove(self, key: bytes) -> None:
        """Removes a key that is there."""
        at = bisect_right(self._floors, key) - 1
        run = self._runs[at]
        del run[bisect_left(run, key)]
        if not run and len(self._runs) > 1:
            del self._runs[at]
            del self._floors[at]
            self._floors[0] = b""

    def below(self, key: bytes) -> bytes:
        """The greatest key < `key`; b"" if there is none."""
        at = bisect_left(self._floors, key, lo=1) - 1
        i = bisect_left(self._runs[at], key)
        return self._runs[at][i - 1] if i else (self._runs[at - 1][-1] if at else b"")

    def at_or_above(self, key: bytes) -> bytes:
        """The smallest key >= `key`; b"" if there is none."""
        at = bisect_right(self._floors, key) - 1
        i = bisect_left(self._runs[at], key)
        if i < len(self._runs[at]):
            return self._runs[at][i]
        return self._runs[at + 1][0] if at + 1 < len(self._runs) else b""

    def starting_with(self, prefix: bytes) -> list[bytes]:
        """All keys that begin with `prefix`, in order."""
        found: list[bytes] = []
        at = bisect_right(self._floors, prefix) - 1
        i = bisect_left(self._runs[at], prefix)
        for run in self._runs[at:]:
            for key in run[i:]:
                if not key.startswith(prefix):
                    return found
                found.append(key)
            i = 0
        return found
