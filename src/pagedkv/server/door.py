"""Whether the queue has room for one more request, known before anything is done for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile

from pagedkv.engine.facts import Facts
from pagedkv.engine.status import CoreStatus
from pagedkv.errors import OverloadError
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.tenants import TenantTable, check_quota
from pagedkv.scheduling.validate import check_room

# Seconds that a refused client is told to wait: at least, and at most.
_SOONEST, _LATEST = 1.0, 600.0


@dataclass(frozen=True, eq=False, slots=True)
class _Place:
    """What a request takes of the queue. number: of the message that brings it to the core."""

    tenant: str | None
    requests: int
    samples: int
    tokens: int
    number: int = 0


class Door:
    """Counts what waits in the core, what is on its way there, and what is being read.

    The bounds are those of the scheduler, with the same words; it looks at them again when a
    request comes to it. Since whatever is on its way counts, it never has to refuse what was let
    in here, unless others were preempted meanwhile.
    """

    def __init__(self, facts: Facts) -> None:
        self._config = facts.config
        self._tenants = TenantTable(facts.config.tenants, facts.config.default_tenant)
        self._status: CoreStatus | None = None
        self._reading: dict[_Place, None] = {}
        self._sent: dict[str, _Place] = {}  # by request, in order
        self._num_refused = 0

    @contextmanager
    def reading(
        self, tenant: str | None, requests: int, samples: int, tokens: int
    ) -> Iterator[None]:
        """While requests are made ready: their number, their samples, and the tokens of their
        prompts as far as they are known. OverloadError: the queue has no room for them.
        """
        place = _Place(tenant, requests, samples, tokens)
        self._check(place)
        self._reading[place] = None
        try:
            yield
        finally:
            del self._reading[place]

    def check(self, add: Add) -> None:
        """OverloadError: the queue has no room for it."""
        self._check(_Place(add.tenant, 1, add.params.n, len(add.prompt)))

    def sent(self, add: Add, number: int) -> None:
        """It is on its way, as the message of this number."""
        place = _Place(add.tenant, 1, add.params.n, len(add.prompt), number)
        self._sent[add.request_id] = place

    def update(self, applied: int, status: CoreStatus | None, brought: Iterable[str] = ()) -> None:
        """The core has taken so many messages, and this is what waits there then.

        brought: requests of which it says something. They are there too, though earlier ones may
        still wait for one of several workers.
        """
        for request in brought:
            self._sent.pop(request, None)
        arrived = list(takewhile(lambda it: self._sent[it].number <= applied, self._sent))
        for request in arrived:
            del self._sent[request]
        self._status = status or self._status

    def counted(self, status: CoreStatus) -> CoreStatus:
        """The core's figures, with what was refused here."""
        refused = tuple(
            (kind, number + self._num_refused if kind == "overload" else number)
            for kind, number in status.counters.requests_refused
        )
        return replace(status, counters=replace(status.counters, requests_refused=refused))

    def _check(self, place: _Place) -> None:
        coming = [*self._reading, *self._sent.values()]
        samples, tokens = _total(coming)
        own = [one for one in coming if one.tenant == place.tenant]
        own_requests, own_tokens = sum(one.requests for one in own), sum(one.tokens for one in own)
        if self._status is not None:
            samples += self._status.waiting_samples
            tokens += self._status.waiting_tokens
            for load in self._status.tenants:
                if load.tenant == place.tenant:
                    own_requests += load.waiting
                    own_tokens += load.waiting_tokens
        try:
            check_room(self._config, place.samples, place.tokens, samples, tokens)
            granted = self._tenants[place.tenant]
            more = own_requests + place.requests - 1  # the last of them has to fit too
            check_quota(place.tenant, granted, more, own_tokens, place.tokens)
        except OverloadError as error:
            error.retry_after = self._retry_after()
            self._num_refused += 1
            raise

    def _retry_after(self) -> float:
        backlog = 0.0 if self._status is None else self._status.backlog_seconds
        return min(max(backlog, _SOONEST), _LATEST)


def _total(places: Iterable[_Place]) -> tuple[int, int]:
    """Samples and tokens."""
    samples = tokens = 0
    for place in places:
        samples, tokens = samples + place.samples, tokens + place.tokens
    return samples, tokens
