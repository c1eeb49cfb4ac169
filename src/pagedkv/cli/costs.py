"""What a simulated step takes: a straight line, a published table, or a recorded run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from pagedkv.cli.workload import find_trace
from pagedkv.errors import ConfigError
from pagedkv.simulation.executor import LinearCost, StepCost
from pagedkv.simulation.fitted import FittedCost
from pagedkv.simulation.perf_tables import read_cost


@dataclass(frozen=True, slots=True)
class Line:
    """Options of the straight line; None: left out.

    The defaults are those of OPT-13B on one A100 as DistServe fitted them (decode step and context;
    prefill tokens).
    """

    step_ms: float | None
    token_us: float | None
    context_us: float | None

    def given(self) -> dict[str, float]:
        """By option."""
        return {
            "--" + name.replace("_", "-"): value
            for name, value in asdict(self).items()
            if value is not None
        }

    def cost(self) -> LinearCost:
        """ConfigError for a number that no time can be."""
        for option, value in self.given().items():
            if not 0 <= value < math.inf:
                raise ConfigError(f"{option}={value}: give at least 0")
        return LinearCost(
            (19.9 if self.step_ms is None else self.step_ms) / 1e3,
            (101.9 if self.token_us is None else self.token_us) / 1e6,
            (0.63 if self.context_us is None else self.context_us) / 1e6,
        )


def step_cost(
    line: Line,
    perf_table: Path | None,
    model: str | None,
    hardware: str | None,
    tensor_parallel: int | None,
    recording: Path | None = None,
) -> StepCost:
    """The cost that the options ask for. ConfigError for options that exclude each other."""
    if recording is not None:
        for option in [*line.given(), *(["--perf-table"] if perf_table is not None else [])]:
            raise ConfigError(f"{option} and --recording exclude each other: leave one out")
    of_table = {"--model": model, "--hardware": hardware, "--tp": tensor_parallel}
    if perf_table is None:
        for option, given in of_table.items():
            if given is not None:
                raise ConfigError(f"{option} chooses from a table: give --perf-table too")
        return line.cost() if recording is None else FittedCost.of(recording)
    for option in line.given():
        raise ConfigError(f"{option} and --perf-table exclude each other: leave one out")
    if model is None:
        raise ConfigError("--model is needed too, to choose from --perf-table")
    return read_cost(find_trace(perf_table), model, hardware, tensor_parallel)
