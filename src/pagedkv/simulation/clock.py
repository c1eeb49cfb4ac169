"""Time that moves only when told to."""

from __future__ import annotations


class VirtualClock:
    """Seconds since the start of a simulation."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def advance(self, seconds: float) -> None:
        """Moves on. ValueError for a negative time."""
        if seconds < 0.0:
            raise ValueError(f"cannot advance the clock by {seconds} seconds: give at least 0")
        self.now += seconds
