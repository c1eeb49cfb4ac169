"""What follows from something that has happened to requests, for whoever carries it out."""

from __future__ import annotations

from typing import NamedTuple

from pagedkv.engine.wire import ToCore
from pagedkv.scheduling.messages import Delta


class Outcome(NamedTuple):
    """What is to be done.

    sends: messages to workers, in order. deltas: for the front end, under its own ids. unplaced:
    requests that want workers now. closed: those that have ended.
    """

    sends: list[tuple[str, ToCore]]
    deltas: list[Delta]
    unplaced: list[str]
    closed: list[str]

    def extend(self, more: Outcome) -> None:
        """And that behind it."""
        self.sends.extend(more.sends)
        self.deltas.extend(more.deltas)
        self.unplaced.extend(more.unplaced)
        self.closed.extend(more.closed)


def nothing() -> Outcome:
    """An empty one, to be added to."""
    return Outcome([], [], [], [])
