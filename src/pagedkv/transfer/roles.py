"""When a worker changes its role: one side starves, and the other can spare one.

The load of a side is 1 when it is full. Of prefill workers: the time that a prompt waits, beside
the time that it may; of decode workers: the share of blocks in use or promised, beside the share at
which they count as full, and never less than 1 while requests wait for room there. A side starves
from 1 on. It can spare a worker if its load, put on one worker less, stays well below that; the gap
between the two bounds, the patience and the rest after each change keep roles from swinging.
(Splitwise, ISCA 2024, has a mixed pool for the same end.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pagedkv.cache.types import Mask
from pagedkv.errors import ConfigError
from pagedkv.transfer.fleet import Fleet
from pagedkv.transfer.routing import FlipConfig, Role, SetRole

Side = Literal["prefill", "decode"]

# Between two changes of roles, beside the time that a side is short of workers before one: moved
# requests and other batches have to show in what workers report.
_REST = 12.0
# Seconds that a worker whose role has changed to "prefill" gets no prompts while it gives away what
# it decodes; what is left then moves on beside them.
_TURN = 10.0


def flip_config(after: float) -> FlipConfig:
    """Roles change when one is short of workers for so many seconds.

    ConfigError for a number that is not above 0.
    """
    if not 0 < after < math.inf:
        raise ConfigError(f"flip_after={after}: give more than 0 seconds")
    return FlipConfig(patience_s=after, rest_s=_REST * after)


@dataclass(slots=True)
class Service:
    """What a worker is for, as its front end has it.

    draining: it is to get nothing new. turning: since when it gives away what it decodes, before it
    takes what its new role brings; None: it does not. flips: changes of its role so far.
    """

    role: Role
    draining: bool = False
    turning: float | None = None
    flips: int = 0

    @property
    def takes_new(self) -> bool:
        """It is to have more."""
        return not self.draining and self.turning is None

    @property
    def takes_decodes(self) -> bool:
        """Whether requests can move to it."""
        return self.takes_new and self.role != "prefill"

    @property
    def gives_away(self) -> bool:
        """Whether what decodes there is to be moved to others, all the time."""
        return self.draining or self.role == "prefill"

    def turn(self, role: Role, now: float) -> None:
        """Its role changes. What it has of the old one it finishes or gives away."""
        self.role = role
        self.flips += 1
        self.turning = now if role == "prefill" else None

    def end_turn(self, now: float, busy: bool) -> bool:
        """Takes what its new role brings, if the time has come; whether it has just come.

        busy: it has requests that it could give away.
        """
        if self.turning is None or (busy and now <= self.turning + _TURN):
            return False
        self.turning = None
        return True


class Roles:
    """Watches the load of both sides. ConfigError for bounds that let roles swing."""

    def __init__(self, config: FlipConfig) -> None:
        if not 0 < config.spare_load < 1:
            raise ConfigError(
                f"spare_load={config.spare_load} must be between 0 and 1, where a side starves"
            )
        for name in ("patience_s", "rest_s", "queue_s", "full_share"):
            if not getattr(config, name) > 0:
                raise ConfigError(f"{name}={getattr(config, name)} must be above 0")
        self._config = config
        self._since: dict[Side, float] = {}  # since when a side starves while the other has spare
        self._rests_until = -math.inf

    def watch(self, fleet: Fleet, held: dict[Side, int], now: float) -> list[SetRole]:
        """At most one change of role. held: requests that wait at the router for room at a side.

        The worker takes no new requests from then on until it reports its new role, or until the
        rest is over: then it is as it reports. To be called at least once a second.
        """
        if now < self._rests_until:
            return []
        fleet.stop_turning()
        loads = {side: self._load(fleet, side, held[side]) for side in _OTHER}
        for side, other in _OTHER.items():
            if not (loads[side] >= 1 and self._can_spare(fleet, other, loads[other])):
                self._since.pop(side, None)
            elif now >= self._since.setdefault(side, now) + self._config.patience_s:
                self._since.clear()
                self._rests_until = now + self._config.rest_s
                place = _least_busy(fleet, other)
                fleet.turn(place, side)
                return [SetRole(fleet.name(place), side)]
        return []

    def _load(self, fleet: Fleet, side: Side, held: int) -> float:
        columns, members = fleet.columns, _members(fleet, side)
        if not members.any():
            return 1.0 if held else 0.0
        if side == "prefill":
            load = float(columns["queue_s"][members].mean()) / self._config.queue_s
        else:
            used = 1 - columns["room"] / np.maximum(columns["num_blocks"], 1)
            load = float(used[members].mean()) / self._config.full_share
        return max(load, 1.0) if held else load

    def _can_spare(self, fleet: Fleet, side: Side, load: float) -> bool:
        n = int(_members(fleet, side).sum())
        return n > 1 and load * n / (n - 1) <= self._config.spare_load


_OTHER: dict[Side, Side] = {"prefill": "decode", "decode": "prefill"}


def _members(fleet: Fleet, side: Side) -> Mask:
    """Workers of this role alone: those of role "both" need no change."""
    prefills, decodes = fleet.columns["prefills"], fleet.columns["decodes"]
    members: Mask = prefills & ~decodes if side == "prefill" else decodes & ~prefills
    return members


def _least_busy(fleet: Fleet, side: Side) -> int:
    """The worker that has the fewest blocks to move away."""
    columns = fleet.columns
    places = np.flatnonzero(_members(fleet, side))
    used = columns["num_blocks"][places] - columns["room"][places]
    queued = columns["queued_tokens"][places]
    return int(places[np.lexsort((queued, used))[0]])
