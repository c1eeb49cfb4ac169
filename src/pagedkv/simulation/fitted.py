"""What steps took in a recorded run, as the cost of simulated ones."""

from __future__ import annotations

import statistics
from pathlib import Path

from pagedkv.errors import ConfigError
from pagedkv.scheduling.cost import CostModel, StepFeatures
from pagedkv.scheduling.step import Result, Step
from pagedkv.simulation.replay_run import replay_run


class FittedCost:
    """A StepCost: a fitted cost model, and the seconds that the loop takes around each step.

    cost: is not changed, and must have seen steps of different sizes. around: what planning and
    delivering take, beside the executor.
    """

    def __init__(self, cost: CostModel, around: float = 0.0) -> None:
        self.cost, self.around = cost, around

    @classmethod
    def of(cls, recording: Path) -> FittedCost:
        """Of a run that `generate --record` wrote, or part of it.

        `around` is the median of the time from one step to the next less the step's own: of many
        steps few are followed by a pause in which nobody wants anything. ConfigError: the file is
        no recording, does not lead to the same decisions, or has too few different steps.
        """
        cost = CostModel()
        starts: list[tuple[int, float]] = []  # index, now
        durations: list[float] = []

        def observe(now: float, step: Step, result: Result) -> None:
            cost.observe(StepFeatures.of(step), result.duration)
            starts.append((step.index, now))
            durations.append(result.duration)

        run = replay_run(recording, observe)
        if run.difference is not None:
            raise ConfigError(
                f"{recording}, line {run.difference.line}: a replay decides otherwise (see "
                "simulate replay)"
            )
        if not cost.fitted:
            raise ConfigError(
                f"{recording}: {cost.num_observed} steps are too few or too much alike: record a "
                "longer run, with prompts of several lengths"
            )
        gaps = [
            later - now - duration
            for (index, now), (after, later), duration in zip(
                starts, starts[1:], durations, strict=False
            )
            if after == index + 1
        ]
        return cls(cost, max(0.0, statistics.median(gaps)) if gaps else 0.0)

    def seconds(self, step: Step) -> float:
        return self.cost.predict(*StepFeatures.of(step)) + self.around

    def __str__(self) -> str:
        return f"{self.cost}; {self.around * 1e3:.3g} ms around a step"
