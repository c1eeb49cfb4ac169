"""How the options of `pagedkv bench serve` are read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv.cli.workload import find_trace, read_arrivals
from pagedkv.errors import ConfigError
from pagedkv.loadtest.datasets import (
    Question,
    prefix_questions,
    random_questions,
    read_questions,
    trace_questions,
)
from pagedkv.loadtest.metrics import METRICS
from pagedkv.loadtest.requests import (
    Goals,
    LoadRequest,
    SloClass,
    Tenant,
    due_times,
    make_requests,
)
from pagedkv.simulation.trace import read_trace
from pagedkv.simulation.workload import Arrivals, Float64, Gamma, Poisson

DATASETS = ("random", "prefix_repetition", "custom", "timed_trace")

_GOAL = re.compile(r"(\w+):(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Workload:
    """The options that say which requests are sent, and when. None: left out."""

    dataset_name: str
    dataset_path: Path | None
    num_prompts: int | None
    input_len: int
    output_len: int
    range_ratio: float
    prefix_len: int
    suffix_len: int
    num_prefixes: int
    request_rate: str | None
    burstiness: float | None
    arrivals: str | None
    speed: float | None
    seed: int

    def make(self, tenants: Sequence[Tenant], slo_classes: Sequence[SloClass]) -> list[LoadRequest]:
        """ConfigError for options that cannot work, alone or together."""
        check_least("--num-prompts", self.num_prompts, 1)
        check_least("--seed", self.seed, 0)
        if self.speed is not None and self.dataset_name != "timed_trace":
            raise ConfigError("--speed is for --dataset-name timed_trace: give --request-rate")
        process = self._process()
        of_questions, of_arrivals, of_owners = np.random.default_rng(self.seed).spawn(3)
        questions, due = self._questions(of_questions)
        if due is None or self.request_rate is not None:
            rate = read_rate(self.request_rate or "inf")
            due = due_times(len(questions), rate, process, of_arrivals)
        return make_requests(questions, due, tenants, slo_classes, of_owners)

    def _process(self) -> Arrivals:
        if self.burstiness is None:
            return Poisson() if self.arrivals is None else read_arrivals(self.arrivals)
        if self.arrivals is not None:
            raise ConfigError("--arrivals say how requests come: leave --burstiness out")
        if not 1e-4 <= self.burstiness <= 1e6:
            raise ConfigError(
                f"--burstiness={self.burstiness}: give more than 0, from 0.0001 to 1000000"
            )
        return Gamma(self.burstiness**-0.5)  # burstiness is the shape of the distribution

    def _questions(self, rng: np.random.Generator) -> tuple[list[Question], Float64 | None]:
        """And when they are due, where the data says so."""
        name, count = self.dataset_name, self.num_prompts or 1000
        match name:
            case "random":
                lengths = self.input_len, self.output_len
                return random_questions(count, *lengths, rng, self.range_ratio), None
            case "prefix_repetition":
                prefixes = self.num_prefixes, self.prefix_len
                lengths = self.suffix_len, self.output_len
                return prefix_questions(count, *prefixes, *lengths, rng), None
            case "custom":
                return read_questions(self._file(), self.num_prompts, self.output_len), None
            case "timed_trace":
                trace = read_trace(self._file())
                trace = trace if self.num_prompts is None else trace.first(self.num_prompts)
                trace = trace if self.speed is None else trace.at_speed(self.speed)
                due = None if trace.arrivals is None else trace.arrivals - trace.arrivals[0]
                return trace_questions(trace, self.seed), due
        raise ConfigError(f"--dataset-name={name!r}: use one of {', '.join(DATASETS)}")

    def _file(self) -> Path:
        if self.dataset_path is None:
            raise ConfigError(
                f"--dataset-name={self.dataset_name} is read from a file: give --dataset-path"
            )
        return find_trace(self.dataset_path)


def check_least(option: str, value: float | None, least: float) -> None:
    """ConfigError if it is there and less."""
    if value is not None and not value >= least:
        raise ConfigError(f"{option}={value}: give at least {least}")


def read_goals(items: Sequence[str]) -> Goals | None:
    """METRIC:MILLISECONDS, several in one text or in several. ConfigError names the wrong one."""
    given: dict[str, float] = {}
    for item in " ".join(items).split():
        match = _GOAL.fullmatch(item)
        if match is None or match[1] not in ("ttft", "tpot", "e2el"):
            raise ConfigError(
                f"--goodput={item!r} must be ttft, tpot or e2el and milliseconds, such as ttft:200"
            )
        if match[1] in given:
            raise ConfigError(f"--goodput says {match[1]} twice: give it once")
        given[match[1]] = float(match[2]) / 1e3
    return Goals(**given) if given else None


def read_tenants(items: Sequence[str]) -> list[Tenant]:
    """NAME=KEY or NAME=KEY:SHARE. ConfigError names the wrong one, but not its key."""
    tenants = []
    for item in items:
        name, _, rest = item.partition("=")
        key, _, share = rest.rpartition(":")
        if not key:
            key, share = rest, "1"
        if not name or not key or _positive(share) is None:
            raise ConfigError(
                f"--tenant={name!r}=... must be NAME=KEY or NAME=KEY:SHARE with a share above 0, "
                "such as a=sk-1:0.7"
            )
        tenants.append(Tenant(name, key, float(share)))
    _refuse_twins("--tenant", [tenant.name for tenant in tenants])
    return tenants


def read_slo_classes(items: Sequence[str]) -> list[SloClass]:
    """NAME=TTFT:TPOT or NAME=TTFT:TPOT:SHARE, in milliseconds. ConfigError names the wrong one."""
    classes = []
    for item in items:
        name, _, rest = item.partition("=")
        numbers = [_positive(part) for part in rest.split(":")]
        if not name or None in numbers or len(numbers) not in (2, 3):
            raise ConfigError(
                f"--slo-class={item!r} must be NAME=TTFT:TPOT or NAME=TTFT:TPOT:SHARE with "
                "milliseconds above 0, such as chat=500:50:0.8"
            )
        ttft, tpot, share = [float(number or 0) for number in (*numbers, 1.0)][:3]
        classes.append(SloClass(name, Goals(ttft / 1e3, tpot / 1e3), share))
    _refuse_twins("--slo-class", [slo_class.name for slo_class in classes])
    return classes


def read_percentiles(text: str) -> list[float]:
    """ConfigError for what is no percentile."""
    try:
        percentiles = [float(item) for item in text.split(",")]
    except ValueError:
        percentiles = [math.nan]
    if not all(0 <= percentile <= 100 for percentile in percentiles):
        raise ConfigError(f"--metric-percentiles={text!r} must be from 0 to 100, such as 50,99")
    return percentiles


def read_metrics(text: str) -> list[str]:
    """ConfigError for one that there is not."""
    names = [item.strip() for item in text.split(",")]
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"--percentile-metrics={text!r}: use some of {','.join(METRICS)}")
    return names


def read_body(text: str | None) -> dict[str, Any]:
    """ConfigError for what is no JSON object."""
    try:
        body = {} if text is None else json.loads(text)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ConfigError(
            f"--extra-body={text!r} must be a JSON object, such as '{{\"top_k\": 40}}'"
        )
    return body


def read_rate(text: str) -> float:
    """A number above 0, or inf. ConfigError for anything else."""
    rate = math.inf if text == "inf" else _positive(text)
    if rate is None:
        raise ConfigError(f"--request-rate={text!r} must be a number above 0, or inf")
    return rate


def _positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def _refuse_twins(option: str, names: Sequence[str]) -> None:
    if twins := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{option} names {twins[0]!r} twice")
