"""The requests of a load test: when each is due, what it asks, whose it is, what it wants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedkv.errors import ConfigError
from pagedkv.loadtest.datasets import Question
from pagedkv.simulation.workload import Arrivals, Float64


@dataclass(frozen=True, slots=True)
class Goals:
    """What a request wants, in seconds; None: it does not mind."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """Requests of one API key; share: of all requests, in proportion to the other tenants'."""

    name: str
    key: str
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class SloClass:
    """Requests with the same goals; share: as of tenants."""

    name: str
    goals: Goals
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """due: seconds after the start of the test."""

    due: float
    question: Question
    tenant: Tenant | None = None
    slo_class: SloClass | None = None


def due_times(n: int, rate: float, arrivals: Arrivals, rng: np.random.Generator) -> Float64:
    """n ascending times in seconds, `rate` a second on average; inf: all at once.

    ConfigError for a rate that is not above 0.
    """
    if math.isinf(rate) and rate > 0:
        return np.zeros(n)
    if not rate >= 1e-9:
        raise ConfigError(f"request_rate={rate}: give more than 0, at least 1e-9 a second, or inf")
    return arrivals.times(n, rate, rng)


def assign(n: int, shares: Sequence[float], rng: np.random.Generator) -> list[int]:
    """A place in `shares` for each of n requests: counts as the shares say, in random order.

    ConfigError for a share that is not above 0.
    """
    for share in shares:
        if not 0 < share < math.inf:
            raise ConfigError(f"share={share}: give more than 0")
    bounds = np.cumsum(shares) / sum(shares)
    points = (np.arange(n) + 0.5) / n
    places: list[int] = rng.permutation(np.searchsorted(bounds[:-1], points, "right")).tolist()
    return places


def make_requests(
    questions: Sequence[Question],
    due: Float64,
    tenants: Sequence[Tenant],
    slo_classes: Sequence[SloClass],
    rng: np.random.Generator,
) -> list[LoadRequest]:
    """Requests in the order of `due`, which has a time for each question.

    A question that names its tenant goes to that one, others to all in shares. ConfigError: it
    names one that is not among `tenants`.
    """
    n = len(questions)
    for_tenants, for_classes = rng.spawn(2)
    by_name = {tenant.name: tenant for tenant in tenants}
    of_tenants: list[Tenant | None] = [None] * n
    if tenants:
        shares = [tenant.share for tenant in tenants]
        of_tenants = [tenants[i] for i in assign(n, shares, for_tenants)]
        for i, question in enumerate(questions):
            if question.tenant is not None:
                if question.tenant not in by_name:
                    raise ConfigError(
                        f"the trace has a tenant {question.tenant!r}: give its key with --tenant "
                        f"{question.tenant}=KEY"
                    )
                of_tenants[i] = by_name[question.tenant]
    of_classes: list[SloClass | None] = [None] * n
    if slo_classes:
        shares = [slo_class.share for slo_class in slo_classes]
        of_classes = [slo_classes[i] for i in assign(n, shares, for_classes)]
    return [
        LoadRequest(moment, question, tenant, slo_class)
        for moment, question, tenant, slo_class in zip(
            due.tolist(), questions, of_tenants, of_classes, strict=True
        )
    ]
