"""Which messages of the front end have been taken, where they go to several workers."""

from __future__ import annotations

from collections import deque


class Applied:
    """Counts as a core does: messages that have been taken, in the order they were sent."""

    def __init__(self) -> None:
        self._sent = 0
        self._open: dict[int, int] = {}  # messages by number: parts of them that are on their way
        self._ways: dict[str, deque[int | None]] = {}  # by worker, in order
        self._taken: dict[str, int] = {}  # by worker

    @property
    def count(self) -> int:
        """All up to this one have been taken."""
        return min(self._open, default=self._sent + 1) - 1

    def begin(self) -> int:
        """A message comes from the front end; its number. It is on its way until `done`."""
        self._sent += 1
        self._open[self._sent] = 1
        return self._sent

    def done(self, number: int) -> None:
        """One part less of a message is on its way."""
        self._open[number] -= 1
        if not self._open[number]:
            del self._open[number]

    def sent(self, worker: str, number: int | None) -> None:
        """Something goes to a worker: a part of message `number`, or None: nothing of the kind."""
        self._ways.setdefault(worker, deque()).append(number)
        if number is not None:
            self._open[number] = self._open.get(number, 0) + 1

    def taken(self, worker: str, count: int) -> None:
        """The worker has taken so many since its start."""
        way = self._ways.get(worker, deque())
        for _ in range(min(len(way), count - self._taken.get(worker, 0))):
            number = way.popleft()
            if number is not None:
                self.done(number)
        self._taken[worker] = count

    def lost(self, worker: str) -> None:
        """It takes nothing more; another process under its name begins at 0."""
        for number in self._ways.pop(worker, ()):
            if number is not None:
                self.done(number)
        self._taken.pop(worker, None)
