"""Stop strings across token borders, without ever showing a character of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Stopped(NamedTuple):
    """Text that may be shown, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopChecker:
    """Watches a text arrive. The stop string that is complete first ends it.

    Of two that end with the same character the longer one is cut off, so that what is shown does
    not depend on how the text was split into tokens. A tail that may be the beginning of a stop
    string is held back until it is known. Costs O(1) amortised a character and stop string
    (Knuth, Morris, Pratt 1977).
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._include = include
        self._searches = [_Search(stop) for stop in stops]
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> Stopped:
        """More text. With `armed` False a stop string that ends in it does not count."""
        if not self._searches:
            return Stopped(text)
        whole = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            found = [search.stop for search in self._searches if search.push(char)]
            if found and armed:
                stop = max(found, key=len)
                self._held = ""
                return Stopped(whole[: end if self._include else end - len(stop)], stop)
        open_ = max(search.matched for search in self._searches)
        # What was held and is no longer part of a beginning is shown now.
        border = len(whole) - open_
        self._held = whole[border:]
        return Stopped(whole[:border])

    def finish(self) -> str:
        """The text ended without a stop string: what was held back belongs to it."""
        held, self._held = self._held, ""
        return held


class _Search:
    """One stop string: how many of its first characters the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = [0] * len(stop)  # longest proper prefix that is a suffix of stop[: i + 1]
        for i in range(1, len(stop)):
            at = self._fallback[i - 1]
            while at and stop[at] != stop[i]:
                at = self._fallback[at - 1]
            self._fallback[i] = at + (stop[at] == stop[i])

    def push(self, char: str) -> bool:
        """Whether the text with this character ends with the whole stop string."""
        while self.matched and self.stop[self.matched] != char:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.stop[self.matched] == char
        if self.matched < len(self.stop):
            return False
        self.matched = self._fallback[-1]
        return True
