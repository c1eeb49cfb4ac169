"""What an allocator made of its requests: sums over steps, and a coarse history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_MOST = 1024  # moments of a history; then every second one is dropped


@dataclass(slots=True)
class Resident:
    """A request of the trace: `tokens` of it are in the pool, `left` are still to come."""

    key: int
    prompt: int
    output: int
    arrival: int  # step
    tokens: int = 0
    left: int = 0

    def start(self) -> None:
        """Puts what is known of it into the pool."""
        done = self.tokens or self.prompt
        self.tokens, self.left = done, self.prompt + self.output - done


class Moment(NamedTuple):
    """One step. Sizes in slots."""

    step: int
    live: int
    reserved: int
    num_holes: int
    largest_hole: int


@dataclass(slots=True)
class Account:
    """Sums over steps; `report` divides them by the steps in which anybody was resident."""

    num_slots: int
    steps: int = 0
    resident: int = 0
    live: int = 0
    reserved: int = 0
    refused: int = 0  # steps in which the first of the queue found no room
    refused_for_holes: int = 0  # of these, those in which the free slots would have sufficed
    unusable: int = 0  # free slots of those steps
    live_refusing: int = 0  # live tokens of the steps in which it found none
    holes: int = 0
    largest_hole: int = 0
    shortages: int = 0  # a running request found no block; an extent was made by compaction
    tokens_moved: int = 0  # by compaction
    tokens_restored: int = 0  # after preemption
    never: int = 0  # requests larger than the pool or the reservation
    end: int = 0  # step in which the last request ended
    peak: int = 0
    history: list[Moment] = field(default_factory=list)  # evenly spaced, at most _MOST
    _stride: int = 1

    def note(
        self,
        step: int,
        resident: int,
        live: int,
        reserved: int,
        holes: Sequence[int],
        refused: str | None = None,
    ) -> None:
        """Adds a step. live, reserved, holes: in slots.

        refused: why the first of the queue found no room: "full", or "holes" if the free slots
        would have sufficed; None: nobody was refused.
        """
        largest = max(holes, default=0)
        if self.steps % self._stride == 0:
            self.history.append(Moment(step, live, reserved, len(holes), largest))
            if len(self.history) > _MOST:
                del self.history[1::2]
                self._stride *= 2
        self.steps += 1
        self.resident += resident
        self.peak = max(self.peak, resident)
        self.live += live
        if refused is not None:
            self.refused += 1
            self.live_refusing += live
        if refused == "holes":
            self.refused_for_holes += 1
            self.unusable += self.num_slots - reserved
        self.reserved += reserved
        self.holes += len(holes)
        self.largest_hole += largest

    def report(self) -> dict[str, float]:
        """Means per step in slots of the pool, and totals."""
        steps, slots = max(self.steps, 1), self.num_slots * max(self.steps, 1)
        return {
            "mean_resident": self.resident / steps,
            "peak_resident": self.peak,
            "utilisation": self.live / slots,
            # Of the steps in which somebody waited for room; 0 if there were none.
            "utilisation_refusing": self.live_refusing / (self.num_slots * max(self.refused, 1)),
            # Reserved and empty: for paging the tails of last blocks.
            "internal_waste": (self.reserved - self.live) / slots,
            # Free, and refused to a request for which it would have sufficed.
            "external_waste": self.unusable / slots,
            "refused_steps": self.refused,
            "refused_while_free_sufficed": self.refused_for_holes,
            "mean_holes": self.holes / steps,
            "mean_largest_hole": self.largest_hole / slots,
            "shortages": self.shortages,
            "tokens_moved": self.tokens_moved,
            "tokens_restored": self.tokens_restored,
            "never_fit": self.never,
            "steps": self.end,
        }
