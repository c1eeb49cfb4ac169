"""Parcels that may overtake each other, in the order in which they were sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Parcel = TypeVar("Parcel")

# Seconds that a parcel may be late when later ones have come already.
LATE = 10.0


class InOrder(Generic[Parcel]):
    """Numbers count from 0. None is lost where the way is not: see `missing`."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, Parcel] = {}

    @property
    def missing(self) -> int | None:
        """The number that others wait for; None: nobody waits."""
        return self._next if self._early else None

    def take(self, number: int, parcel: Parcel) -> list[Parcel]:
        """One has come: those whose turn it is now. One that has come before gives none."""
        if number >= self._next:
            self._early[number] = parcel
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        return ready


def when_late(parcels: InOrder[Any], act: Callable[[str], None]) -> None:
    """To be called when one has come: acts if the others still wait for the same one long after.

    act: is told what is missing, in the running event loop.
    """

    def look(missing: int) -> None:
        if parcels.missing == missing:
            act(f"call {missing} did not come for {LATE:g} s")

    if parcels.missing is not None:
        asyncio.get_running_loop().call_later(LATE, look, parcels.missing)
