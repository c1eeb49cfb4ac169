"""Requests that wait at the router for room: by priority, then tenants in turn.

A tenant's turn comes when it has been served least: a counter for each tenant that has requests
here, which grows by the tokens of those that get their place, over the tenant's weight. Who comes
begins where the one stands that has been served least, so nobody saves up for later. (These are the
virtual token counters of Sheng et al., OSDI 2024, for room at workers instead of steps.) Of one
tenant who came first is first.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from copy import copy
from itertools import tee
from typing import NamedTuple

from pagedkv.transfer.placement import NoPair
from pagedkv.transfer.routing import Arrival


class Names:
    """Names that are made when they are first needed, and kept."""

    def __init__(self, names: Iterable[bytes]) -> None:
        (self._names,) = tee(names, 1)  # stays before the first

    def __iter__(self) -> Iterator[bytes]:
        return copy(self._names)

    @property
    def first(self) -> bytes:
        """b"" if there is none."""
        return next(iter(self), b"")


class Held(NamedTuple):
    """A request that waits; those of a tenant sort by priority and arrival."""

    priority: int
    number: int
    arrival: Arrival
    names: Names
    why: NoPair

    @property
    def deadline(self) -> float:
        return deadline_of(self.arrival)


def deadline_of(arrival: Arrival) -> float:
    """Infinity for none."""
    return math.inf if arrival.deadline is None else arrival.deadline


class Waiting:
    """Who waits, and who is next. No line in it is empty."""

    def __init__(self) -> None:
        self._lines: dict[str | None, list[Held]] = {}  # by tenant
        self._served: dict[str | None, float] = {}  # of the same tenants
        self._held: dict[str, Held] = {}  # by request
        self._first_deadline = math.inf  # of all, or earlier

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._held.values())

    @property
    def first(self) -> Held:
        """Who is next. ValueError if nobody waits."""
        return min(map(self._head, self._lines))[-1]

    def push(self, held: Held) -> None:
        """One more waits."""
        tenant = held.arrival.tenant
        if tenant not in self._lines:
            self._served[tenant] = min(self._served.values(), default=0.0)
        insort(self._lines.setdefault(tenant, []), held)
        self._held[held.arrival.request_id] = held
        self._first_deadline = min(self._first_deadline, held.deadline)

    def still_waits(self, why: NoPair) -> None:
        """The first has looked for room again, in vain."""
        first = self.first._replace(why=why)
        self._lines[first.arrival.tenant][0] = self._held[first.arrival.request_id] = first

    def serve(self) -> Held:
        """The first has got its place."""
        first = self.first
        arrival = first.arrival
        tokens = arrival.prompt_tokens + arrival.output_tokens
        self._served[arrival.tenant] += tokens / arrival.weight
        self.drop(arrival.request_id)
        return first

    def drop(self, request_id: str) -> None:
        """It waits no longer, if it did."""
        held = self._held.pop(request_id, None)
        if held is None:
            return
        tenant = held.arrival.tenant
        line = self._lines[tenant]
        del line[bisect_left(line, held[:2])]
        if not line:
            del self._lines[tenant], self._served[tenant]

    def last_of_longest(self) -> Held:
        """Who came last of the tenant that has the most here. ValueError if nobody waits."""
        return max(self._lines.values(), key=len)[-1]

    def length(self, tenant: str | None) -> int:
        """Requests of a tenant that wait."""
        return len(self._lines.get(tenant, ()))

    def expire(self, now: float) -> list[Held]:
        """Takes out those whose deadline has passed."""
        if now <= self._first_deadline:
            return []
        late = [held for held in self if held.deadline < now]
        for held in late:
            self.drop(held.arrival.request_id)
        self._first_deadline = min((held.deadline for held in self), default=math.inf)
        return late

    def _head(self, tenant: str | None) -> tuple[int, float, int, Held]:
        held = self._lines[tenant][0]
        return held.priority, self._served[tenant], held.number, held
