"""What a front end says of all its workers together, while their processes come and go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pagedkv.cluster.seats import Seat
from pagedkv.cluster.totals import total_counters, total_status
from pagedkv.engine.status import ClusterStatus, CoreStatus, WorkerLoad
from pagedkv.engine.wire import Own, ToCore
from pagedkv.scheduling.counters import EngineCounters
from pagedkv.scheduling.messages import Resume


class Figures:
    """Counts since the start, and the newest status of all. No counter ever falls."""

    def __init__(self) -> None:
        self.newest: CoreStatus | None = None  # None: no worker has told anything yet
        self._counted = ClusterStatus(())
        self._past: list[EngineCounters] = []  # of processes that are gone, added up

    def sent(self, message: ToCore) -> None:
        """It goes to a worker."""
        counted = self._counted
        match message:
            case Own():
                self._counted = replace(counted, moves_done=counted.moves_done + 1)
            case Resume():
                self._counted = replace(counted, resumed=counted.resumed + 1)

    def move_failed(self) -> None:
        """A request stays where it was."""
        self._counted = replace(self._counted, moves_failed=self._counted.moves_failed + 1)

    def ended(self, status: CoreStatus | None) -> None:
        """A worker's process is gone; this was its last word."""
        if status is not None:
            self._past = [total_counters([*self._past, status.counters])]

    def update(
        self,
        seats: Iterable[Seat],
        loads: tuple[WorkerLoad, ...],
        draining: bool,
        missing: str | None,
        unplaced: int,
    ) -> CoreStatus | None:
        """The status as it is now; see `ClusterStatus` for what is given."""
        present = [seat.status for seat in seats if seat.status is not None]
        cluster = replace(self._counted, workers=loads, missing=missing, unplaced=unplaced)
        if present:
            self.newest = total_status(present, self._past, draining, cluster)
        elif self.newest is not None:  # nobody is there: the pools are those that there were
            self.newest = replace(self.newest, cluster=cluster)
        return self.newest
