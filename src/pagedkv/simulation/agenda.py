"""What is to happen on a virtual clock, in the order of its time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

Action = Callable[[float], None]


class Agenda:
    """Actions and when they are due. What is due at one time is done in the order it was noted.

    `now`: seconds, the time of the action that is being done.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_done = 0
        self._due: list[tuple[float, int, Action]] = []
        self._num_noted = 0

    def at(self, time: float, action: Action) -> None:
        """Notes an action, which is given its time. ValueError for a time that has passed."""
        if not self.now <= time < math.inf:
            raise ValueError(f"time={time}: it is {self.now}: give a time to come")
        heapq.heappush(self._due, (time, self._num_noted, action))
        self._num_noted += 1

    def run(self, until: float = math.inf) -> None:
        """Does everything that is due up to `until`, and what that brings."""
        while self._due and self._due[0][0] <= until:
            self.now, _, action = heapq.heappop(self._due)
            self.num_done += 1
            action(self.now)
