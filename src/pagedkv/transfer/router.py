"""`Router`: which workers a request goes to, which requests wait here, which are refused.

A pure machine: `handle(event, now)` returns decisions, reads no clock and draws no random number,
so the simulator drives the same object as a cluster does, and a recorded run can be decided again.

A request whose workers have no room waits here, not in a worker's queue: by the time there is room
another worker may have its prefix, and tenants get room in turn. It is refused as soon as its first
token cannot come in time any more, with the reason that it waited for.
"""

from __future__ import annotations

import math

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
from pagedkv.transfer.waiting import Held, Names, Waiting, deadline_of

_PATIENCE_S = 1.0  # until a picture is asked for again


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
        self._waiting = Waiting()
        self._arrivals = 0
        self._num_assigned = self._num_shed = self._num_gaps = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._asked: dict[int, float] = {}  # when a picture was asked for, by place
        self._roles = None if config.flip is None else Roles(config.flip)

    @property
    def num_held(self) -> int:
        return len(self._waiting)

    def held_for(self, side: str) -> int:
        """Requests that wait for room at a worker that can "prefill" or "decode"."""
        return sum(held.why.side == side for held in self._waiting)

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
            held=len(self._waiting),
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
                self._waiting.drop(event.request_id)
                return self._retry(now)
            case Tick():
                return self._watch_roles(now)

    def _arrive(self, arrival: Arrival, now: float) -> list[Decision]:
        waiting = self._waiting
        self._arrivals += 1
        waiting.drop(arrival.request_id)
        names = Names(arrival.names)
        found = self._choose(arrival, names, now)
        # Not past those who wait: they were first, and would wait for ever.
        if isinstance(found, Pair) and waiting and waiting.first.priority <= arrival.priority:
            found = waiting.first.why
        if isinstance(found, Pair):
            return [self._assign(arrival, found)]
        if found.hopeless:
            return [Shed(arrival.request_id, found.reason)]
        refused: list[Decision] = []
        if len(waiting) >= self.config.max_held:
            full = f"max_held={self.config.max_held} requests wait already"
            last = waiting.last_of_longest().arrival if waiting else arrival
            if waiting.length(last.tenant) <= waiting.length(arrival.tenant) + 1:
                return [Shed(arrival.request_id, f"{found.reason}, and {full}")]
            waiting.drop(last.request_id)
            refused.append(Shed(last.request_id, f"{full}, most of them of its tenant"))
        waiting.push(Held(arrival.priority, self._arrivals, arrival, names, found))
        return refused

    def _leave(self, worker: str) -> None:
        if worker in self.fleet.places:
            place = self.fleet.leave(worker)
            self.prefixes.forget(place)
            self._asked.pop(place, None)

    def _may_help(self, place: int) -> bool:
        """Whether the first that waits may have waited for room at this worker."""
        if not self._waiting:
            return False
        head = self._waiting.first
        columns, tokens = self.fleet.columns, head.arrival.prompt_tokens
        if head.why.side == "decode":
            tokens += head.arrival.output_tokens
        need = min(blocks_of(tokens, self.config.block_size), int(columns["num_blocks"][place]))
        both = bool(columns["prefills"][place] and columns["decodes"][place])
        return both or int(columns["room"][place]) >= need

    def _retry(self, now: float) -> list[Decision]:
        """Those that wait, in order, until one still has to."""
        decisions: list[Decision] = []
        while self._waiting:
            head = self._waiting.first
            found = self._choose(head.arrival, head.names, now)
            if isinstance(found, Pair):
                self._waiting.serve()
                decisions.append(self._assign(head.arrival, found))
            elif found.hopeless:
                self._waiting.drop(head.arrival.request_id)
                reason = f"{found.reason}; {head.why.reason}"
                decisions.append(Shed(head.arrival.request_id, reason))
            else:
                self._waiting.still_waits(found)
                break
        return decisions

    def _expire(self, now: float) -> list[Decision]:
        """Those whose deadline has passed while they waited."""
        return [
            Shed(held.arrival.request_id, f"its deadline has passed; {held.why.reason}")
            for held in self._waiting.expire(now)
        ]

    def _watch_roles(self, now: float) -> list[Decision]:
        if self._roles is None:
            return []
        held: dict[Side, int] = {side: self.held_for(side) for side in ("prefill", "decode")}
        return [*self._roles.watch(self.fleet, held, now)]

    def _choose(self, arrival: Arrival, names: Names, now: float) -> Pair | NoPair:
        cached = self.prefixes.cached_blocks(names, self.fleet.num_places)
        affinity = names.first or arrival.request_id.encode()
        wanted = Wanted(
            arrival.prompt_tokens,
            arrival.output_tokens,
            cached,
            int.from_bytes(affinity[-8:]),
            deadline_of(arrival) - now,
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
