"""Invented requests: when they arrive, how long they are, whose they are.

Everything follows from a seed. Arrivals, lengths and each tenant have random numbers of their own:
two workloads that differ in their arrivals alone have the same lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagedkv.errors import ConfigError
from pagedkv.simulation.trace import MAX_COUNT, Int64, Trace, read_trace

Float64 = npt.NDArray[np.float64]

_MAX_PERIODS = 10**7  # of bursts


class Arrivals(Protocol):
    """When requests come."""

    def times(self, n: int, rate: float, rng: np.random.Generator) -> Float64:
        """n times in seconds, ascending, of `rate` a second on average. `rng` is used up."""
        ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals: gaps are exponential."""

    def times(self, n: int, rate: float, rng: np.random.Generator) -> Float64:
        return np.cumsum(rng.exponential(1 / rate, n))


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gaps of a Gamma distribution: cv > 1 comes in clusters, 1 is Poisson, below 1 is regular.

    cv: the gaps' standard deviation / their mean; shape 1 / cv**2. ConfigError outside
    [0.001, 100].
    """

    cv: float

    def __post_init__(self) -> None:
        if not 1e-3 <= self.cv <= 100:
            raise ConfigError(f"cv={self.cv}: give more than 0, from 0.001 to 100")

    def times(self, n: int, rate: float, rng: np.random.Generator) -> Float64:
        return np.cumsum(rng.gamma(self.cv**-2, self.cv**2 / rate, n))


@dataclass(frozen=True, slots=True)
class Bursts:
    """Poisson arrivals in periods that are on, none in those that are off, in turns.

    on, off: mean seconds of a period; each is exponential. The first is on. While on, requests
    come at rate * (on + off) / on, so that `rate` stays the mean. ConfigError unless on > 0 and
    off >= 0, both finite.
    """

    on: float
    off: float

    def __post_init__(self) -> None:
        if not 0 < self.on < np.inf:
            raise ConfigError(f"on={self.on}: give more than 0 seconds")
        if not 0 <= self.off < np.inf:
            raise ConfigError(f"off={self.off}: give at least 0 seconds")

    def times(self, n: int, rate: float, rng: np.random.Generator) -> Float64:
        """ConfigError if that takes more than 10**7 periods."""
        busy = np.cumsum(rng.exponential(self.on / (self.on + self.off) / rate, n))
        expected = busy[-1] / self.on
        if expected > _MAX_PERIODS:
            raise ConfigError(
                f"on={self.on}: {n} requests at {rate} a second would take {expected:.3g} bursts: "
                f"give longer ones, at most {_MAX_PERIODS} in all"
            )
        ends = np.zeros(0)  # of periods that are on, counting only the time on
        while not len(ends) or ends[-1] < busy[-1]:
            more = np.cumsum(rng.exponential(self.on, int(expected) + 8))
            ends = np.append(ends, more + (ends[-1] if len(ends) else 0.0))
        pauses = np.concatenate([[0.0], np.cumsum(rng.exponential(self.off, len(ends)))])
        times: Float64 = busy + pauses[np.searchsorted(ends, busy)]
        return times


class Lengths(Protocol):
    """How many tokens requests have."""

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Int64, Int64]:
        """Prompt tokens >= 1 and output tokens >= 0 of n requests."""
        ...


@dataclass(frozen=True, slots=True)
class GeometricLengths:
    """Independent geometric lengths of these means. ConfigError for one outside [1, 2**31)."""

    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        _check_count("prompt_tokens", self.prompt_tokens)
        _check_count("output_tokens", self.output_tokens)

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Int64, Int64]:
        return rng.geometric(1 / self.prompt_tokens, n), rng.geometric(1 / self.output_tokens, n)


@dataclass(frozen=True, slots=True)
class LengthTable:
    """Pairs drawn from a table of m rows, with replacement."""

    prompt_tokens: Int64  # [m]
    output_tokens: Int64  # [m]

    @classmethod
    def read(cls, path: str | Path) -> LengthTable:
        """A file with the columns prompt_tokens and output_tokens, read as `read_trace` does."""
        trace = read_trace(path)
        return cls(trace.prompt_tokens, trace.output_tokens)

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Int64, Int64]:
        rows = rng.integers(len(self.prompt_tokens), size=n)
        return self.prompt_tokens[rows], self.output_tokens[rows]


def invent(
    num_requests: int,
    rate: float | Mapping[str, float],
    arrivals: Arrivals,
    lengths: Lengths,
    seed: int = 0,
) -> Trace:
    """Requests in the order of their arrival.

    rate: a second; or by tenant: then each has arrivals of its own, independent of the others'.
    ConfigError for a number of requests outside [1, 2**31), a rate of which arrivals cannot be
    made, a seed below 0, no tenant.
    """
    _check_count("num_requests", num_requests)
    if seed < 0:
        raise ConfigError(f"seed={seed}: give at least 0")
    rates = list(rate.items()) if isinstance(rate, Mapping) else [(None, rate)]
    if not rates:
        raise ConfigError("no tenant has a rate: give one at least")
    for tenant, value in rates:
        if not 1e-9 <= value < np.inf:
            whose = "" if tenant is None else f" of tenant {tenant!r}"
            raise ConfigError(f"rate={value}{whose}: give more than 0, at least 1e-9 a second")
    of_lengths, *of_tenants = np.random.default_rng(seed).spawn(1 + len(rates))
    times = np.concatenate(
        [
            arrivals.times(num_requests, value, rng)
            for (_, value), rng in zip(rates, of_tenants, strict=True)
        ]
    )
    order = np.argsort(times, kind="stable")[:num_requests]
    prompts, outputs = lengths.sample(num_requests, of_lengths)
    names = [tenant for tenant, _ in rates if tenant is not None]
    tenants = tuple(names[place] for place in (order // num_requests).tolist()) if names else None
    return Trace(times[order], prompts, outputs, tenants, None, None)


def make_trace(
    num_requests: int, rate: float, prompt_tokens: int, output_tokens: int, seed: int = 0
) -> Trace:
    """The plainest workload: Poisson arrivals, geometric lengths of the given means.

    ConfigError as of `invent` and `GeometricLengths`.
    """
    lengths = GeometricLengths(prompt_tokens, output_tokens)
    return invent(num_requests, rate, Poisson(), lengths, seed)


def _check_count(name: str, value: int) -> None:
    if not 1 <= value < MAX_COUNT:
        raise ConfigError(f"{name}={value}: give more than 0 and less than 2**31")
