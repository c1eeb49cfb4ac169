"""Which rates of requests a device bears, by formulas: no request is simulated.

Prompts are prefilled one after the other. They wait as in an M/G/1 queue: on average
rate * E[T**2] / (2 * (1 - load)) seconds (Pollaczek and Khinchine; rho * T / (2 * (1 - rho)) where
all take the same T), longer than x with probability load * exp(-load * x / average), which is exact
where T is exponential. Decodes are as many as Little's law says: rate * tokens * seconds a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.errors import ConfigError
from pagedkv.simulation.executor import StepCost, step_of
from pagedkv.simulation.objective import Objective
from pagedkv.simulation.split import Rates
from pagedkv.simulation.trace import Trace

Float64 = npt.NDArray[np.float64]

_GROUPS = 48  # of requests, by the length of their prompts
BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)  # tokens a step
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Device:
    """What steps take on it, how many tokens of K/V it holds, and how many sequences it decodes.

    transfer: seconds that its link is taken by the K/V of one prompt token; 0.0 for a link that
    costs nothing.
    """

    cost: StepCost
    pool_tokens: int
    max_num_seqs: int = 256
    transfer: float = 0.0

    def __post_init__(self) -> None:
        for name in ("pool_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: give at least 1")
        if not 0 <= self.transfer < math.inf:
            raise ConfigError(f"transfer={self.transfer}: give at least 0 seconds")


@dataclass(frozen=True, slots=True)
class Colocated:
    """What a device bears that does both. budget: the tokens of a step with which it bears most."""

    rate: float
    budget: int


class _Prefills(NamedTuple):
    """Of each group of requests: what its prompt takes, and in how many steps."""

    seconds: Float64
    chunks: Float64


class ClosedForm:
    """The requests of a trace on one kind of device, with an objective.

    Lengths are taken in groups of about equally many requests, sorted by their prompts.
    """

    def __init__(self, trace: Trace, device: Device, objective: Objective) -> None:
        self._device, self._objective = device, objective
        order = np.argsort(trace.prompt_tokens, kind="stable")
        groups = np.array_split(order, min(_GROUPS, len(trace)))
        outputs = np.maximum(trace.output_tokens, 1)
        self._shares = np.array([len(group) for group in groups]) / len(trace)
        self._prompts = np.array([trace.prompt_tokens[group].mean() for group in groups])
        self._steps = outputs - 1.0  # the first token comes with the prefill
        self.mean_prompt = float(trace.prompt_tokens.mean())
        self.mean_steps = float(self._steps.mean())
        # What a sequence that is being decoded holds, on average over those that are.
        held = self._steps * (trace.prompt_tokens + outputs / 2)
        total = float(self._steps.sum())
        self.mean_context = float(held.sum()) / total if total else self.mean_prompt

    def rates(self) -> Rates:
        return Rates(self.prefill_rate(), self.decode_rate(), self.colocated().rate)

    def prefill_rate(self) -> float:
        """Highest rate at which enough first tokens come in time, if nothing is decoded.

        By the best of BUDGETS. K/V leave by the link while the next chunk is computed.
        """
        return min(max(self._prefill_rate(budget) for budget in BUDGETS), self._link_rate)

    def _prefill_rate(self, budget: int) -> float:
        times = self._prefills(0, budget).seconds
        low, high = 0.0, 1 / float(self._shares @ times)
        for _ in range(50):
            rate = (low + high) / 2
            enough = self._in_time(rate, times) >= self._objective.share
            low, high = (rate, high) if enough else (low, rate)
        return low

    def decode_rate(self) -> float:
        """Highest rate at which tokens follow one another in time, if nothing is prefilled.

        A step's time and the pool bound how many sequences are decoded at once; so many requests
        come and go that the average must stay below that by what a Poisson number varies.
        """
        if not self.mean_steps:
            return self._link_rate
        slots, most = self._slots, 0
        while most < slots:  # the most with which a step is fast enough
            middle = (most + slots + 1) // 2
            fast = self._step(middle, 0.0) <= self._objective.tpot
            most, slots = (middle, slots) if fast else (most, middle - 1)
        if not most:
            return 0.0
        batch = self._average_of(most)
        seconds = self._step(max(1, round(batch)), 0.0)
        return min(batch / (self.mean_steps * seconds), self._link_rate)

    def colocated(self) -> Colocated:
        """Highest rate of a device that does both in one step, by the best of BUDGETS."""
        if not self.mean_steps:
            return max(
                (Colocated(self._prefill_rate(budget), budget) for budget in BUDGETS),
                key=lambda colocated: colocated.rate,
            )
        found = [Colocated(self._colocated_rate(budget), budget) for budget in BUDGETS]
        return max(found, key=lambda colocated: colocated.rate)

    def _colocated_rate(self, budget: int) -> float:
        """Chunks of `budget` tokens beside the decodes."""
        low, high = 0, max(1, int(self._average_of(self._slots)))
        best = 0.0
        while low < high:
            batch = (low + high + 1) // 2
            rate = self._rate_of(batch, budget)
            if rate is None:
                high = batch - 1
            else:
                low, best = batch, rate
        return best

    def _rate_of(self, batch: int, budget: int) -> float | None:
        """The rate at which so many are decoded at once; None if too few are served well then.

        Of `mean_steps` tokens each, a share q of which comes in steps with a chunk. A step without
        takes t0, one with it t1 on average, so batch = rate * mean_steps * (mean step), which is
        solved for the rate. The tokens of a request meet a binomial number of chunks.
        """
        prefills = self._prefills(batch, budget)
        mean = float(self._shares @ prefills.seconds)
        t0, t1 = self._step(batch, 0.0), mean / float(self._shares @ prefills.chunks)
        rate = batch / t0 / (self.mean_steps + batch * mean * (1 / t0 - 1 / t1))
        load = rate * mean
        if load >= 1.0:
            return None
        q = load / t1 / (load / t1 + (1 - load) / t0)
        well = self._in_time(rate, prefills.seconds) * self._on_pace(t0, t1, q)
        return rate if well >= self._objective.share else None

    def _prefills(self, batch: int, budget: int) -> _Prefills:
        """Of each group, its prompts in chunks of `budget` tokens beside so many decodes."""
        pieces = np.floor_divide(self._prompts, budget)
        rests = self._prompts - pieces * budget
        piece = self._step(batch, float(budget)) if pieces.any() else 0.0
        last = np.array([self._step(batch, rest) if rest else 0.0 for rest in rests.tolist()])
        return _Prefills(pieces * piece + last, pieces + (rests > 0))

    def _on_pace(self, t0: float, t1: float, q: float) -> float:
        """Share of the requests whose tokens follow one another in time: see `_rate_of`."""
        steps = np.unique(np.maximum(self._steps, 1.0), return_counts=True)
        room = self._objective.tpot - t0 - (t1 - t0) * q
        spread = (t1 - t0) * np.sqrt(q * (1 - q) / steps[0])
        on_pace = [_NORMAL.cdf(room / s) if s > 0 else float(room >= 0) for s in spread.tolist()]
        return float(np.dot(on_pace, steps[1]) / steps[1].sum())

    def _in_time(self, rate: float, times: Float64) -> float:
        """Share of the requests whose first token comes in time. times: of each group's prefill."""
        load = rate * float(self._shares @ times)
        if load >= 1.0:
            return 0.0
        wait = rate * float(self._shares @ times**2) / (2 * (1 - load))
        slack = self._objective.ttft - times
        late = load * np.exp(-load * np.maximum(slack, 0.0) / wait) if wait else 0.0
        return float(self._shares @ np.where(slack < 0, 0.0, 1.0 - late))

    @property
    def _slots(self) -> int:
        """Sequences that fit in the pool, and have seats."""
        return min(self._device.max_num_seqs, int(self._device.pool_tokens / self.mean_context))

    @property
    def _link_rate(self) -> float:
        """Prompts a second that go over the link."""
        each = self._device.transfer * self.mean_prompt
        return 1 / each if each else math.inf

    def _average_of(self, most: int) -> float:
        """The mean of a Poisson number that is above `most` as rarely as the objective allows."""
        z = max(0.0, _NORMAL.inv_cdf(self._objective.share))
        return (math.sqrt(z * z / 4 + most) - z / 2) ** 2

    def _step(self, decodes: int, chunk: float) -> float:
        """Seconds of a step with so many decodes and a chunk of a prompt."""
        return self._device.cost.seconds(step_of(decodes, round(self.mean_context), round(chunk)))
