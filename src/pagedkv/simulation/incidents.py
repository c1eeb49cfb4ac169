"""What happens to the workers of a simulated cluster while they serve."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pagedkv.errors import ConfigError
from pagedkv.simulation.agenda import Action, Agenda
from pagedkv.simulation.front import Front
from pagedkv.transfer.routing import FlipConfig, Role, Tick

# Seconds between two looks at requests that should be elsewhere, and between two at roles.
_LOOK, _TICK = 0.25, 0.2
# Seconds without a token after which nobody looks any more: it is a standstill.
_STANDSTILL = 3600.0


@dataclass(frozen=True, slots=True)
class Incidents:
    """Workers and seconds: from when on one is drained, and when one dies with all that it has.

    It does not come back. flip: when roles change; None: they do not.
    """

    drains: tuple[tuple[str, float], ...] = ()
    deaths: tuple[tuple[str, float], ...] = ()
    flip: FlipConfig | None = None

    def check(self, roles: Mapping[str, Role]) -> None:
        """ConfigError: no such worker, no such time, or nobody of a role would be left."""
        for name, time in (*self.drains, *self.deaths):
            if name not in roles:
                known = f"{next(iter(roles))} to {list(roles)[-1]}"
                raise ConfigError(f"there is no worker {name!r:.100}: they are {known}")
            if not 0 <= time < math.inf:
                raise ConfigError(f"worker {name} at {time} s: give at least 0 seconds")
        gone = {name for name, _ in (*self.drains, *self.deaths)}
        for role in dict.fromkeys(roles.values()):
            if not any(it == role and name not in gone for name, it in roles.items()):
                raise ConfigError(
                    f"no worker that is neither drained nor dead would be left for {role!r}: "
                    "leave one, or give more workers"
                )

    def begin(self, agenda: Agenda, front: Front, until: float) -> None:
        """Notes what is to happen. until: when the last request arrives."""
        for act, happens in ((front.drain, self.drains), (front.lose, self.deaths)):
            for name, time in happens:
                agenda.at(time, _done_to(name, act))

        def busy(now: float) -> bool:
            return now < until or (
                len(front.dispatch) > 0 and now < max(until, front.last_delivery) + _STANDSTILL
            )

        if self.flip is not None:
            _repeat(agenda, _TICK, lambda now: front.tell_router(Tick()), busy)
        if self.drains or self.deaths or self.flip is not None:
            _repeat(agenda, _LOOK, lambda now: front.look(), busy)


QUIET = Incidents()


def _done_to(name: str, act: Callable[[str], None]) -> Action:
    return lambda now: act(name)


def _repeat(
    agenda: Agenda,
    every: float,
    action: Action,
    while_: Callable[[float], bool],
) -> None:
    def act(now: float) -> None:
        action(now)
        if while_(now):
            agenda.at(now + every, act)

    agenda.at(agenda.now, act)
