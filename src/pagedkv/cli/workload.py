"""Which requests are simulated: those of a file, or invented ones."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from pagedkv.errors import ConfigError
from pagedkv.scheduling.tenants import Tenant
from pagedkv.simulation.trace import Trace, read_trace
from pagedkv.simulation.workload import (
    Arrivals,
    Bursts,
    Gamma,
    GeometricLengths,
    Lengths,
    LengthTable,
    Poisson,
    invent,
)

TRACES_VARIABLE = "PAGEDKV_TRACES"


@dataclass(frozen=True, slots=True)
class Invented:
    """Options of invented requests, as they were given; None: left out."""

    rate: float | None
    tenants: str | None
    arrivals: str | None
    prompt_tokens: int | None
    output_tokens: int | None
    lengths: Path | None
    seed: int | None

    def make(self, num_requests: int) -> Trace:
        """ConfigError for options that cannot work, alone or together."""
        rates = None if self.tenants is None else by_tenant("--tenants", "RATE", self.tenants)
        if rates is not None and self.rate is not None:
            raise ConfigError("--tenants say at which rates requests come: leave --rate out")
        return invent(
            num_requests,
            rates or (2.0 if self.rate is None else self.rate),
            read_arrivals(self.arrivals or "poisson"),
            self._lengths(),
            self.seed or 0,
        )

    def _lengths(self) -> Lengths:
        if self.lengths is None:
            return GeometricLengths(
                256 if self.prompt_tokens is None else self.prompt_tokens,
                128 if self.output_tokens is None else self.output_tokens,
            )
        if self.prompt_tokens is not None or self.output_tokens is not None:
            raise ConfigError(
                "--lengths say how long requests are: leave --prompt-tokens and --output-tokens out"
            )
        return LengthTable.read(find_trace(self.lengths))


def workload(
    trace: Path | None, requests: int | None, speed: float | None, invented: Invented
) -> Trace:
    """The requests that the options ask for. ConfigError for options that exclude each other."""
    if trace is None:
        wanted = invented.make(500 if requests is None else requests)
    else:
        for name, given in asdict(invented).items():
            if given is not None:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} is for invented requests: leave it out, or --trace")
        wanted = read_trace(find_trace(trace))
        wanted = wanted if requests is None else wanted.first(requests)
    return wanted if speed is None else wanted.at_speed(speed)


def find_trace(path: Path) -> Path:
    """A bare name that is no file here is looked for where PAGEDKV_TRACES says."""
    elsewhere = Path(os.environ.get(TRACES_VARIABLE, "")) / path
    if len(path.parts) == 1 and not path.exists() and elsewhere.exists():
        return elsewhere
    return path


def read_arrivals(text: str) -> Arrivals:
    """poisson, gamma:CV or bursts:ON,OFF. ConfigError for anything else."""
    name, _, rest = text.partition(":")
    try:
        numbers = [float(item) for item in rest.split(",")] if rest else []
    except ValueError:
        name, numbers = "", []
    match name, numbers:
        case "poisson", []:
            return Poisson()
        case "gamma", [cv]:
            return Gamma(cv)
        case "bursts", [on, off]:
            return Bursts(on, off)
    raise ConfigError(
        f"--arrivals={text!r} must be poisson, gamma:CV or bursts:ON,OFF, such as gamma:2 or "
        "bursts:10,50"
    )


def by_tenant(option: str, kind: str, text: str) -> dict[str, float]:
    """Reads NAME=NUMBER,... ConfigError naming the option; kind: its word for the number."""
    numbers: dict[str, float] = {}
    for item in text.split(","):
        name, _, number = item.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            name = ""
        if not name:
            raise ConfigError(f"{option}={text!r} must be NAME={kind},..., such as a=1.5,b=3")
        if name in numbers:
            raise ConfigError(f"{option}={text!r} names {name!r} twice")
        numbers[name] = value
    return numbers


def tenant_weights(text: str | None) -> tuple[tuple[str, Tenant], ...]:
    """The setting `SchedulerConfig.tenants` of --tenant-weights."""
    if text is None:
        return ()
    weights = by_tenant("--tenant-weights", "WEIGHT", text)
    return tuple((name, Tenant(weight)) for name, weight in weights.items())
