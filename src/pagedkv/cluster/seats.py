"""What the front end knows of the workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from pagedkv.cluster.router_messages import Duty
from pagedkv.cluster.worker import Started, host_id
from pagedkv.engine.facts import Facts
from pagedkv.engine.status import CoreStatus, WorkerLoad
from pagedkv.engine.wire import Answer, ToCore
from pagedkv.scheduling.messages import Add, Delta, Resume
from pagedkv.transfer.roles import Service
from pagedkv.transfer.routing import Role

_DRIFT = 1e-4  # seconds a second, more than clocks of two hosts differ by


@dataclass(slots=True)
class Seat:
    """A worker of the plan, whichever process has its place now.

    service: stays when the process goes. facts: None: it has no model yet. offset: its clock less
    ours, in seconds. stuck: what keeps requests that should move away; None: nothing.
    """

    name: str
    service: Service
    started: Started | None = None
    facts: Facts | None = None
    status: CoreStatus | None = None
    offset: float = 0.0
    looked: float = 0.0  # at it, on our clock
    starts: int = 0
    stuck: str | None = None

    @property
    def ready(self) -> bool:
        """It takes requests."""
        return self.facts is not None

    @property
    def takes_new(self) -> bool:
        """It is ready, and is to have more."""
        return self.ready and self.service.takes_new

    @property
    def takes_decodes(self) -> bool:
        """Whether requests can move here."""
        return self.ready and self.service.takes_decodes

    @property
    def duty(self) -> Duty:
        """As the router is to know it."""
        boot = None if self.started is None or not self.ready else self.started.boot
        return Duty(self.service.role, not self.service.takes_new, boot)

    def begin(self, started: Started, now: float) -> None:
        """A process has its place. now: on our clock."""
        self.started = started
        self.offset = 0.0 if started.host == host_id() else started.now - now
        self.starts, self.looked = self.starts + 1, now

    def shows(self, theirs: float, now: float) -> None:
        """Its clock showed `theirs` a moment ago: what was least late says most of its offset.

        Clocks drift apart: what was seen counts the less, the longer ago it was.
        """
        if self.started is not None and self.started.host != host_id():
            self.offset = max(self.offset - _DRIFT * (now - self.looked), theirs - now)
            self.looked = now

    def end(self) -> None:
        """That process is gone, with all that it had to give away."""
        self.started = self.facts = self.status = self.service.turning = self.stuck = None

    def on_its_clock(self, message: ToCore) -> ToCore:
        """A message with its times moved to the worker's clock."""
        match message:
            case Add():
                return self._moved(message)
            case Resume():
                return replace(
                    message,
                    add=self._moved(message.add),
                    admitted_at=self._there(message.admitted_at),
                    first_token_at=self._there(message.first_token_at),
                    last_token_at=self._there(message.last_token_at),
                )
        return message

    def on_our_clock(self, delta: Delta) -> Delta:
        """The way back."""
        if not self.offset or delta.admitted_at is None:
            return delta
        return delta._replace(admitted_at=delta.admitted_at - self.offset)

    def answer_on_our_clock(self, answer: Answer) -> Answer:
        """The same for a picture, see `engine.picture`; other answers have no times."""
        taken = answer.value
        if not self.offset or not isinstance(taken, dict):
            return answer

        def moved(entries: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
            return [{**entry, name: entry[name] - self.offset} for entry in entries]

        waiting = taken["waiting"]
        picture = {
            **taken,
            "sequences": moved(taken["sequences"], "arrival"),
            "waiting": {**waiting, "requests": moved(waiting["requests"], "arrival")},
            "decisions": moved(taken["decisions"], "now"),
        }
        return msgspec.structs.replace(answer, value=picture)

    def load(self, requests: int) -> WorkerLoad:
        """For operators. requests: those that it owns."""
        status = self.status
        return WorkerLoad(
            self.name,
            self.service.role,
            self._state(),
            max(0, self.starts - 1),
            self.service.flips,
            requests,
            0 if status is None else status.num_running,
            0 if status is None else status.num_waiting,
            0 if status is None else status.num_blocks,
            0 if status is None else status.blocks_held,
            self.stuck,
        )

    def _state(self) -> str:
        if self.started is None:
            return "gone"
        if self.facts is None:
            return "loading"
        if self.service.draining:
            return "draining"
        return "ready" if self.service.turning is None else "turning"

    def _moved(self, add: Add) -> Add:
        if not self.offset:
            return add
        return replace(add, arrival=add.arrival + self.offset, deadline=self._there(add.deadline))

    def _there(self, time: float | None) -> float | None:
        return None if time is None else time + self.offset


class Seats:
    """All of a plan, in its order. roles: of each at first, by name."""

    def __init__(self, roles: Mapping[str, Role]) -> None:
        self._seats = {name: Seat(name, Service(role)) for name, role in roles.items()}

    def __getitem__(self, worker: str) -> Seat:
        """KeyError: there is none of that name."""
        return self._seats[worker]

    def __iter__(self) -> Iterator[Seat]:
        return iter(self._seats.values())

    def __len__(self) -> int:
        return len(self._seats)

    @property
    def names(self) -> list[str]:
        return list(self._seats)

    @property
    def ready(self) -> list[str]:
        """Names of those that have a model."""
        return [seat.name for seat in self if seat.ready]

    @property
    def duties(self) -> dict[str, Duty]:
        return {seat.name: seat.duty for seat in self}

    @property
    def missing(self) -> str | None:
        """Which kind of worker has to come back before a request can be placed.

        One that drains takes nothing; one that turns will soon.
        """
        roles = {seat.service.role for seat in self if seat.ready and not seat.service.draining}
        for role in ("prefill", "decode"):
            if not roles & {role, "both"}:
                drains = any(seat.ready and seat.service.role in (role, "both") for seat in self)
                return f"no {role} worker is there" + (" but one that drains" if drains else "")
        return None

    def can_spare(self, seat: Seat) -> bool:
        """Whether another worker of its role takes requests."""
        role = seat.service.role
        others = (it for it in self if it.service.role == role and it is not seat)
        return any(other.takes_new for other in others)
