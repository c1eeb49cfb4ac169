"""`Router`: which workers a request goes to, which requests wait here, which are refused.

A pure machine: `handle(event, now)` returns decisions, reads no clock and draws no random number,
so the simulator drives the same object as a cluster does, and a recorded run can be decided again.

A request whose workers have no room waits here, not in a worker's queue: by the time there is room
another worker may have its prefix. It is refused as soon as its first token cannot come in time any
more, with the reason that it waited for.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator
from copy import copy
from itertools import tee
from typing import NamedTuple

from pagedkv.errors import ConfigError
from pagedkv.transfer.fleet import Fleet, Sent
from pagedkv.transfer.placement import NoPair, Pair, Wanted, blocks_of, choose_pair
from pagedkv.transfer.prefix_index import WorkerPrefixes
from pagedkv.transfer.roles import Roles, Side
from pagedkv.transfer.routing import (
    Arrival,
    AskForPicture,
    Assign,
    Decision,
    Ended,
    RouterConfig,
    RouterEvent,
    RouterStats,
    Shed,
    Tick,
    WorkerEvents,
    WorkerGone,
    WorkerReport,
)

_PATIENCE_S = 1.0  # until a picture is asked for again


class _Held(NamedTuple):
    """A request that waits here; they sort by priority and arrival."""

    priority: int
    number: int
    arrival: Arrival
    names: _Names
    why: NoPair


class Router:
    """Places requests on workers by cached prefix, load, room and deadlines.

    The front end tells of arrivals and ends, each worker of its state and its cache. An arrival is
    answered at once with Assign or Shed, or later, when an event has made room or time has run out.
    ConfigError names what of the configuration cannot be.
    """

    def __init__(self, config: RouterConfig, prefixes: WorkerPrefixes | None = None) -> None:
        _check(config)
        self.config = config
        self.fleet = Fleet()
        self.prefixes = WorkerPrefixes() if prefixes is None else prefixes
        self._held: list[_Held] = []  # in order
        self._held_ids: set[str] = set()
        self._first_deadline = math.inf  # of those held, or earlier
        self._arrivals = 0
        self._num_assigned = self._num_shed = self._num_gaps = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._asked: dict[int, float] = {}  # when a picture was asked for, by place
        self._roles = None if config.flip is None else Roles(config.flip)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def held_for(self, side: str) -> int:
        """Requests that wait for room at a worker that can "prefill" or "decode"."""
        return sum(held.why.side == side for held in self._held)

    def handle(self, event: RouterEvent, now: float) -> list[Decision]:
        """What follows from the event. `now`: seconds, never less than before."""
        decisions = self._decide(event, now) + self._expire(now)
        for decision in decisions:
            if isinstance(decision, Shed):
                self._num_shed += 1
        return decisions

    def stats(self) -> RouterStats:
        """What it has done so far."""
        return RouterStats(
            workers=len(self.fleet.places),
            held=len(self._held),
            names=len(self.prefixes),
            assigned=self._num_assigned,
            shed=self._num_shed,
            gaps=self._num_gaps,
            dropped=self.prefixes.dropped,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
        )

    def _decide(self, event: RouterEvent, now: float) -> list[Decision]:
        match event:
            case Arrival():
                return self._arrive(event, now)
            case WorkerEvents():
                return self._learn(event, now)
            case WorkerReport():
                place = self.fleet.report(event)
                return self._retry(now) if self._may_help(place) else []
            case WorkerGone():
                self._leave(event.worker)
                return []
            case Ended():
                self.fleet.ended(event.request_id)
                self._drop_held(event.request_id)
                return self._retry(now)
            case Tick():
                return self._watch_roles(now)

    def _arrive(self, arrival: Arrival, now: float) -> list[Decision]:
        self._arrivals += 1
        self._drop_held(arrival.request_id)
        names = _Names(arrival.names)
        found = self._choose(arrival, names, now)
        # Not past those who wait: they were first, and would wait for ever.
        if isinstance(found, Pair) and self._held and self._held[0].priority <= arrival.priority:
            found = self._held[0].why
        if isinstance(found, Pair):
            return [self._assign(arrival, found)]
        if found.hopeless:
            return [Shed(arrival.request_id, found.reason)]
        if len(self._held) >= self.config.max_held:
            reason = f"{found.reason}, and max_held={self.config.max_held} requests wait already"
            return [Shed(arrival.request_id, reason)]
        insort(self._held, _Held(arrival.priority, self._arrivals, arrival, names, found))
        self._held_ids.add(arrival.request_id)
        self._first_deadline = min(self._first_deadline, _deadline(arrival))
        return []

    def _drop_held(self, request_id: str) -> None:
        if request_id in self._held_ids:
            self._held_ids.remove(request_id)
            self._held = [h for h in self._held if h.arrival.request_id != request_id]

    def _leave(self, worker: str) -> None:
        if worker in self.fleet.places:
            place = self.fleet.leave(worker)
            self.prefixes.forget(place)
            self._asked.pop(place, None)

    def _may_help(self, place: int) -> bool:
        """Whether the first that waits may have waited for room at this worker."""
        if not self._held:
            return False
        head = self._held[0]
        row, tokens = self.fleet.rows[place], head.arrival.prompt_tokens
        if head.why.side == "decode":
            tokens += head.arrival.output_tokens
        need = min(blocks_of(tokens, self.config.block_size), int(row["num_blocks"]))
        return bool(row["prefills"] and row["decodes"]) or int(row["room"]) >= need

    def _retry(self, now: float) -> list[Decision]:
        """Those that wait, in order, until one still has to."""
        decisions: list[Decision] = []
        while self._held:
            head = self._held[0]
            found = self._choose(head.arrival, head.names, now)
            if isinstance(found, Pair):
                decisions.append(self._assign(head.arrival, found))
            elif found.hopeless:
                reason = f"{found.reason}; {head.why.reason}"
                decisions.append(Shed(head.arrival.request_id, reason))
            else:
                self._held[0] = head._replace(why=found)
                break
            del self._held[0]
            self._held_ids.remove(head.arrival.request_id)
        return decisions

    def _expire(self, now: float) -> list[Decision]:
        """Those whose deadline has passed while they waited."""
        if now <= self._first_deadline:
            return []
        late = [held for held in self._held if _deadline(held.arrival) < now]
        self._held = [held for held in self._held if _deadline(held.arrival) >= now]
        self._held_ids.difference_update(held.arrival.request_id for held in late)
        self._first_deadline = min((_deadline(h.arrival) for h in self._held), default=math.inf)
        return [
            Shed(held.arrival.request_id, f"its deadline has passed; {held.why.reason}")
            for held in late
        ]

    def _watch_roles(self, now: float) -> list[Decision]:
        if self._roles is None:
            return []
        held: dict[Side, int] = {side: self.held_for(side) for side in ("prefill", "decode")}
        return [*self._roles.watch(self.fleet, held, now)]

    def _choose(self, arrival: Arrival, names: _Names, now: float) -> Pair | NoPair:
        cached = self.prefixes.cached_blocks(names, len(self.fleet.rows))
        affinity = names.first or arrival.request_id.encode()
        wanted = Wanted(
            arrival.prompt_tokens,
            arrival.output_tokens,
            cached,
            int.from_bytes(affinity[-8:]),
            _deadline(arrival) - now,
            math.inf if arrival.tpot is None else arrival.tpot,
        )
        return choose_pair(self.config, self.fleet, wanted)

    def _assign(self, arrival: Arrival, pair: Pair) -> Assign:
        prompt, size = arrival.prompt_tokens, self.config.block_size
        left, blocks = prompt - pair.cached_tokens, blocks_of(prompt, size)
        whole = blocks_of(prompt + arrival.output_tokens, size)
        if pair.prefill == pair.decode:
            parts: tuple[Sent, ...] = (Sent(pair.prefill, whole, left, 1),)
        else:
            parts = Sent(pair.prefill, blocks, left, 0), Sent(pair.decode, whole, 0, 1)
        self.fleet.send(arrival.request_id, parts)
        self._num_assigned += 1
        self._prompt_tokens += prompt
        self._cached_tokens += pair.cached_tokens
        return Assign(
            arrival.request_id,
            self.fleet.name(pair.prefill),
            self.fleet.name(pair.decode),
            pair.cached_tokens,
            pair.decode_cached_tokens,
            pair.queue_s,
            pair.prefill_s,
            pair.transfer_s,
        )

    def _learn(self, event: WorkerEvents, now: float) -> list[Decision]:
        place = self.fleet.places.get(event.worker)
        if place is None:  # its first report is still to come, or it has left
            return []
        followed = self.prefixes.follows(place)
        if self.prefixes.apply(place, event.seq, event.batch):
            self._asked.pop(place, None)
            return []
        self._num_gaps += followed
        if now < self._asked.get(place, -math.inf) + _PATIENCE_S:
            return []
        self._asked[place] = now
        return [AskForPicture(event.worker)]


class _Names:
    """Names that are made when they are first needed, and kept."""

    def __init__(self, names: Iterable[bytes]) -> None:
        (self._names,) = tee(names, 1)  # stays before the first

    def __iter__(self) -> Iterator[bytes]:
        return copy(self._names)

    @property
    def first(self) -> bytes:
        """b"" if there is none."""
        return next(iter(self), b"")


def _deadline(arrival: Arrival) -> float:
    return math.inf if arrival.deadline is None else arrival.deadline


def _check(config: RouterConfig) -> None:
    for name, least in (
        ("block_size", 1),
        ("kv_bytes_per_token", 0),
        ("epsilon_s", 0),
        ("max_held", 0),
    ):
        value = getattr(config, name)
        if not value >= least:
            raise ConfigError(f"{name}={value} of a router: give at least {least}")
    for name in ("local", "remote"):
        link = getattr(config, name)
        if not (link.latency_s >= 0 and link.bytes_per_s > 0):
            raise ConfigError(f"{name}={link} of a router: a link takes time, and moves something")
