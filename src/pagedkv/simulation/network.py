"""Links between simulated workers: latency, bandwidth, and waiting for one another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from pagedkv.errors import ConfigError
from pagedkv.simulation.agenda import Action, Agenda


@dataclass(frozen=True, slots=True)
class LinkModel:
    """A worker's link to the network, the same both ways.

    A message of n bytes in so many pieces takes the sender's way out and the receiver's way in,
    both at once if both are free, for n / bytes_per_second + pieces * per_piece seconds, and is
    there `latency` seconds later. A piece is contiguous memory: small pieces are what makes a link
    slow (bandwidth as reached: s / (per_piece + s / bytes_per_second) for pieces of s bytes).
    ConfigError for what no link can be.
    """

    bytes_per_second: float
    latency: float = 20e-6
    per_piece: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_second < np.inf:
            raise ConfigError(f"bytes_per_second={self.bytes_per_second}: give more than 0")
        for name in ("latency", "per_piece"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ConfigError(f"{name}={getattr(self, name)}: give at least 0 seconds")

    def seconds(self, num_bytes: int, pieces: int = 1) -> float:
        """How long a message holds both ends."""
        return num_bytes / self.bytes_per_second + pieces * self.per_piece


class Network:
    """Brings messages. First come, first served on every way out and then on every way in.

    Messages from one worker to another arrive in the order they were sent. What waits for a way in
    holds up nobody else: a switch between them keeps it. Steps of workers go on meanwhile.
    """

    def __init__(self, link: LinkModel, agenda: Agenda) -> None:
        self.link, self._agenda = link, agenda
        self.num_bytes = 0
        self.busy_seconds = 0.0  # of ways out, all together
        self.waited_seconds = 0.0  # for a way out, and for a way in
        self._out_free: defaultdict[Hashable, float] = defaultdict(float)
        self._in_free: defaultdict[Hashable, float] = defaultdict(float)

    def send(
        self, source: Hashable, target: Hashable, num_bytes: int, pieces: int, arrive: Action
    ) -> None:
        """Sends a message now; `arrive` is done when it is there."""
        seconds, now = self.link.seconds(num_bytes, pieces), self._agenda.now
        start = max(now, self._out_free[source])
        self._out_free[source] = start + seconds
        self.num_bytes += num_bytes
        self.busy_seconds += seconds
        self.waited_seconds += start - now

        def leave(now: float) -> None:
            begin = max(now, self._in_free[target])
            self._in_free[target] = begin + seconds
            self.waited_seconds += begin - now
            self._agenda.at(begin + seconds + self.link.latency, arrive)

        if start > now:
            self._agenda.at(start, leave)  # who comes to the way in first is not known before
        else:
            leave(now)
