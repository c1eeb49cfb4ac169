"""A trace through a cluster of workers, each with the real loop, under one virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pagedkv.errors import ConfigError, PagedKVError
from pagedkv.scheduling.messages import Delta
from pagedkv.simulation.agenda import Agenda
from pagedkv.simulation.executor import StepCost
from pagedkv.simulation.objective import Objective
from pagedkv.simulation.serve import (
    RequestTimes,
    Server,
    collecting_seldom,
    make_requests,
    request_times,
)
from pagedkv.simulation.trace import Trace
from pagedkv.simulation.worker import Worker


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """`workers` that do everything. ConfigError for fewer than one."""

    server: Server
    workers: int

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"workers={self.workers}: give at least 1")


@dataclass(slots=True)
class WorkerUse:
    """What a worker has done."""

    steps: int
    busy_seconds: float
    requests: int


@dataclass(slots=True)
class ClusterRun:
    """What came of a trace."""

    requests: list[RequestTimes]
    workers: list[WorkerUse] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last end."""
        ends = [r.end for r in self.requests if r.end is not None]
        return max(ends, default=0.0) - min(r.arrival for r in self.requests)

    @property
    def arrival_seconds(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].arrival - self.requests[0].arrival

    def attainment(self, objective: Objective) -> float:
        """Share of the requests that were served well."""
        return self._served_well(objective) / len(self.requests)

    def goodput(self, objective: Objective) -> float:
        """Requests a second that were served well, a worker."""
        seconds = self.seconds
        return self._served_well(objective) / seconds / len(self.workers) if seconds else 0.0

    def _served_well(self, objective: Objective) -> int:
        return sum(
            r.reason in ("stop", "length") and objective.met(r.ttft, r.tpot) for r in self.requests
        )


def serve_cluster(trace: Trace, shape: ClusterShape, cost: StepCost) -> ClusterRun:
    """Runs every request of the trace to its end.

    Requests are those of `serve`. The same inputs give the same run. ConfigError for settings that
    cannot work.
    """
    arrivals = trace.arrivals if trace.arrivals is not None else np.zeros(len(trace))
    run = ClusterRun(request_times(trace, arrivals))
    agenda = Agenda()

    def deliver(worker: Worker, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            request = run.requests[int(delta.request_id)]
            if delta.token_ids:
                request.tokens += len(delta.token_ids)
                if request.first_token is None:
                    request.first_token = agenda.now
            if delta.finish_reason is not None:
                request.end, request.reason = agenda.now, delta.finish_reason
                load[worker.index] -= 1

    workers = [Worker(i, shape.server, cost, agenda, deliver) for i in range(shape.workers)]
    load = [0] * len(workers)
    count = [0] * len(workers)
    coming = make_requests(trace, arrivals, shape.server.max_model_len)

    def arrive(now: float) -> None:
        add = next(coming)
        worker = workers[min(range(len(workers)), key=load.__getitem__)]
        load[worker.index] += 1
        count[worker.index] += 1
        worker.receive(add)
        i = int(add.request_id) + 1
        if i < len(trace):
            agenda.at(float(arrivals[i]), arrive)

    agenda.at(float(arrivals[0]), arrive)
    with collecting_seldom():
        agenda.run()
    run.workers = [WorkerUse(w.num_steps, w.busy_seconds, count[w.index]) for w in workers]
    left = sum(request.end is None for request in run.requests)
    if left:
        raise PagedKVError(
            f"at {agenda.now:.6g} s {left} requests have not ended and nothing is due: the cluster "
            "has come to a standstill"
        )
    return run
