"""Parcels that may overtake each other, in the order in which they were sent."""

from __future__ import annotations

from typing import Generic, TypeVar

Parcel = TypeVar("Parcel")


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
