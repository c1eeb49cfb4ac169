"""What a front end says of all its workers together, while their processes come and go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pagedkv.cluster.seats import Seat
from pagedkv.cluster.totals import total_counters, total_status
from pagedkv.engine.status import ClusterStatus, CoreStatus
from pagedkv.scheduling.counters import EngineCounters
from pagedkv.transfer.routing import RouterStats


class Figures:
    """The newest status of all. No counter ever falls."""

    def __init__(self) -> None:
        self.newest: CoreStatus | None = None  # None: no worker has told anything yet
        self._past: list[EngineCounters] = []  # of processes that are gone, added up
        self._router = self._past_router = RouterStats()

    def ended(self, status: CoreStatus | None) -> None:
        """A worker's process is gone; this was its last word."""
        if status is not None:
            self._past = [total_counters([*self._past, status.counters])]

    def routing(self, stats: RouterStats) -> None:
        """The router's word on itself, since it began."""
        self._router = stats.after(self._past_router)

    def new_router(self) -> None:
        """The router has gone, or begun; it counts from 0 again."""
        self._past_router = self._router

    def update(
        self,
        seats: Iterable[Seat],
        draining: bool,
        cluster: ClusterStatus,
    ) -> CoreStatus | None:
        """The status as it is now. cluster: without what is known here."""
        cluster = replace(cluster, router=self._router)
        present = [seat.status for seat in seats if seat.status is not None]
        if present:
            self.newest = total_status(present, self._past, draining, cluster)
        elif self.newest is not None:  # nobody is there: the pools are those that there were
            self.newest = replace(self.newest, cluster=cluster)
        return self.newest
