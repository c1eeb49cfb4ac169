"""What comes of moves: counted, and when one that has failed is tried again. Sans-I/O."""

from __future__ import annotations

from dataclasses import dataclass

# Seconds before the second try; twice as many before each further one, MOST at most.
FIRST, MOST = 1.0, 32.0


@dataclass(slots=True)
class Counts:
    """Since the start. Each move that was begun ends as one of these:

    moves_done: its request has another owner. moves_failed: as the owner says, or because one of
    the two has died. moves_ended: the request ended before. resumed: requests whose worker died.
    """

    moves_done: int = 0
    moves_failed: int = 0
    moves_ended: int = 0
    resumed: int = 0


@dataclass(frozen=True, slots=True)
class Tries:
    """The moves of a request that have failed since it came to its owner.

    failures: how many. to, reason, at: of the last: the worker that did not get it, why, and when.
    """

    failures: int = 0
    to: str = ""
    reason: str = ""
    at: float = 0.0

    def failed(self, to: str, reason: str, now: float) -> Tries:
        """With one more."""
        return Tries(self.failures + 1, to, reason, now)

    def is_due(self, now: float) -> bool:
        """Whether it may be tried again."""
        return not self.failures or now >= self.at + pause(self.failures)


def pause(failures: int) -> float:
    """Seconds between the last of so many failures and the next try."""
    return float(min(MOST, FIRST * 2.0 ** min(failures - 1, 30)))
