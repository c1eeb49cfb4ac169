"""A trace through a cluster of workers, each with the real loop, under one virtual clock.

Scheduler, block manager, router, fence and the machines that move requests are those of a real
cluster; steps and links take the time of a cost and of a `LinkModel`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pagedkv.errors import ConfigError, PagedKVError
from pagedkv.scheduling.config import check_integer
from pagedkv.simulation.agenda import Agenda
from pagedkv.simulation.executor import StepCost
from pagedkv.simulation.front import Front
from pagedkv.simulation.incidents import QUIET, Incidents
from pagedkv.simulation.kv import limits
from pagedkv.simulation.network import LinkModel, Network
from pagedkv.simulation.objective import Objective
from pagedkv.simulation.serve import (
    RequestTimes,
    Server,
    collecting_seldom,
    make_requests,
    request_times,
)
from pagedkv.simulation.trace import Trace
from pagedkv.simulation.worker import MoveCounts, Surroundings, Worker
from pagedkv.tiers.names import Namer
from pagedkv.transfer.limits import TransferLimits
from pagedkv.transfer.router import Router
from pagedkv.transfer.routing import Link, Role, RouterConfig

_LINK = LinkModel(bytes_per_second=25e9)
# A message with K/V takes the link so long, at most.
_PIECE_SECONDS = 0.02
# Of a kind; and of K/V: beyond any model's.
_MOST_WORKERS, _MOST_TOKEN_BYTES = 100_000, 2**40
# Bytes a second; seconds. Over a slower link workers ask each other whether they are there faster
# than it brings the questions.
_SLOWEST, _LONGEST = 1e3, 1e3


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """`workers` that do everything, or so many that prefill and so many that decode.

    token_bytes: of K/V. ConfigError for a cluster that cannot serve anything.
    """

    server: Server
    workers: int = 0
    prefill: int = 0
    decode: int = 0
    token_bytes: int = 131_072
    link: LinkModel = _LINK

    def __post_init__(self) -> None:
        for name in ("workers", "prefill", "decode"):
            check_integer(name, getattr(self, name), 0, _MOST_WORKERS)
        if not self.workers and not (self.prefill and self.decode):
            raise ConfigError(
                f"workers={self.workers}, prefill={self.prefill}, decode={self.decode}: give "
                "workers, or both of the others"
            )
        check_integer("token_bytes", self.token_bytes, 1, _MOST_TOKEN_BYTES)
        if self.link.bytes_per_second < _SLOWEST:
            raise ConfigError(
                f"bytes_per_second={self.link.bytes_per_second}: give at least {_SLOWEST:g}"
            )
        for name in ("latency", "per_piece"):
            if getattr(self.link, name) > _LONGEST:
                raise ConfigError(
                    f"{name}={getattr(self.link, name)}: give at most {_LONGEST:g} seconds"
                )
        if not self.server.prefix_caching:
            raise ConfigError("prefix_caching=False: moved requests are found by their names")

    @property
    def roles(self) -> list[tuple[str, Role]]:
        """Names of the workers, and what they do."""
        kinds: tuple[tuple[Role, str, int], ...] = (
            ("both", "worker", self.workers),
            ("prefill", "prefill", self.prefill),
            ("decode", "decode", self.decode),
        )
        return [(f"{word}-{i}", role) for role, word, count in kinds for i in range(count)]

    @property
    def limits(self) -> TransferLimits:
        """Pieces that suit the link."""
        tokens = int(self.link.bytes_per_second * _PIECE_SECONDS) // self.token_bytes
        size = self.server.block_size
        return limits(max(1, tokens // size) * size)


@dataclass(frozen=True, slots=True)
class WorkerUse:
    """What a worker has done. role: the last. received: requests that moved here.

    busy_seconds: of its steps.
    """

    name: str
    role: Role
    requests: int
    received: int
    steps: int
    busy_seconds: float


@dataclass(frozen=True, slots=True)
class NetworkUse:
    """bytes: of all messages. busy_seconds: of all ways out. waited_seconds: for a link."""

    bytes: int
    busy_seconds: float
    waited_seconds: float


@dataclass(slots=True)
class ClusterRun:
    """What came of a trace.

    decisions: of the router; resumed: requests that went on elsewhere when their worker had died;
    flips: of roles; num_events: of the simulation.
    """

    requests: list[RequestTimes]
    workers: list[WorkerUse] = field(default_factory=list)
    moves: MoveCounts = field(default_factory=MoveCounts)
    network: NetworkUse = NetworkUse(0, 0.0, 0.0)
    decisions: int = 0
    resumed: int = 0
    flips: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_events: int = 0

    @property
    def seconds(self) -> float:
        """From the first arrival to the last end."""
        ends = [r.end for r in self.requests if r.end is not None]
        return max(ends, default=0.0) - min(r.arrival for r in self.requests)

    def ended(self, reason: str) -> int:
        """Requests that ended with this reason; "shed": the router refused them."""
        return sum(request.reason == reason for request in self.requests)

    def attainment(self, objective: Objective) -> float:
        """Share of the requests that were served well."""
        return self._served_well(objective) / len(self.requests)

    def ttft_attainment(self, objective: Objective) -> float:
        """Share of the requests whose first token came in time."""
        return sum(objective.met(r.ttft, np.nan) for r in self.requests) / len(self.requests)

    def tpot_attainment(self, objective: Objective) -> float:
        """Of those with a first token, the share whose other tokens came in time."""
        started = [r for r in self.requests if r.first_token is not None]
        return sum(objective.met(0.0, r.tpot) for r in started) / len(started) if started else 0.0

    def goodput(self, objective: Objective) -> float:
        """Requests a second that were served well, a worker."""
        seconds = self.seconds
        return self._served_well(objective) / seconds / len(self.workers) if seconds else 0.0

    def _served_well(self, objective: Objective) -> int:
        return sum(
            r.reason in ("stop", "length") and objective.met(r.ttft, r.tpot) for r in self.requests
        )


def serve_cluster(
    trace: Trace,
    shape: ClusterShape,
    cost: StepCost,
    *,
    shed: Objective | None = None,
    incidents: Incidents = QUIET,
    make_router: Callable[[RouterConfig], Router] = Router,
) -> ClusterRun:
    """Runs every request of the trace to its end.

    Requests are those of `serve`. shed: the router refuses requests whose first token cannot come
    in time. incidents: what happens to the workers meanwhile. make_router: for whoever measures it.
    The same inputs give the same run. ConfigError for settings that cannot work.
    """
    server, roles = shape.server, dict(shape.roles)
    incidents.check(roles)
    arrivals = trace.arrivals if trace.arrivals is not None else np.zeros(len(trace))
    run = ClusterRun(request_times(trace, arrivals), prompt_tokens=int(trace.prompt_tokens.sum()))
    agenda = Agenda()
    network = Network(shape.link, agenda)
    # Prompts of a trace that does not say what they share have nothing in common.
    namer = None if trace.block_ids is None else Namer(b"simulated")
    link = Link(shape.link.latency, shape.link.bytes_per_second)
    config = RouterConfig(
        server.block_size,
        shape.token_bytes,
        link,
        link,
        max_held=len(trace),
        flip=incidents.flip,
    )
    router = make_router(config)
    front = Front(agenda, router, run.requests, server.scheduling, namer, shed)
    around = Surroundings(agenda, network, front, shape.token_bytes, shape.limits, namer, run.moves)
    for name, role in roles.items():
        front.workers[name] = Worker(name, role, server, cost, around)
    for worker in front.workers.values():
        worker.report()
    coming = make_requests(trace, arrivals, server.max_model_len)
    times = iter(arrivals.tolist())

    def arrive(now: float) -> None:
        front.arrive(next(coming))
        soon = next(times, None)
        if soon is not None:
            agenda.at(soon, arrive)

    incidents.begin(agenda, front, until=float(arrivals.max()))
    with collecting_seldom():
        agenda.at(next(times), arrive)
        agenda.run()
    left = sum(request.end is None for request in run.requests)
    if left:
        raise PagedKVError(
            f"at {agenda.now:.6g} s {left} requests have not ended and nothing is due: the cluster "
            "has come to a standstill"
        )
    run.workers = [
        WorkerUse(
            w.name, w.service.role, w.num_requests, w.num_received, w.num_steps, w.busy_seconds
        )
        for w in front.workers.values()
    ]
    run.network = NetworkUse(network.num_bytes, network.busy_seconds, network.waited_seconds)
    counts = front.dispatch.tally
    run.moves.received, run.moves.failed = counts.moves_done, counts.moves_failed
    run.decisions, run.resumed = front.num_decisions, counts.resumed
    run.flips = sum(worker.service.flips for worker in front.workers.values())
    run.cached_tokens, run.num_events = front.cached_tokens, agenda.num_done
    return run
