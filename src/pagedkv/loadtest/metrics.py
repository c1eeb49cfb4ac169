"""The figures of a load test, under the names that `vllm bench serve` gives them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedkv.loadtest.drive import Outcome
from pagedkv.loadtest.requests import Goals
from pagedkv.simulation.workload import Float64

METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of one answer, in seconds.

    ttft: from sending until the first token. tpot: mean time of each token after the first, nan if
    there is none. itl: times between chunks, [chunks - 1]. e2el: from sending until the last token.
    """

    ttft: float
    tpot: float
    itl: Float64
    e2el: float

    @classmethod
    def of(cls, outcome: Outcome) -> Latencies:
        times, tokens = outcome.answer.times or [outcome.ended], outcome.answer.output_tokens
        ttft, e2el = times[0] - outcome.sent, times[-1] - outcome.sent
        tpot = (e2el - ttft) / (tokens - 1) if tokens > 1 else float("nan")
        return cls(ttft, tpot, np.diff(times), e2el)

    def reach(self, goals: Goals) -> bool:
        """Whether every goal is met; one token has no time between tokens to be too long."""
        return (
            (goals.ttft is None or self.ttft <= goals.ttft)
            and (goals.tpot is None or not self.tpot > goals.tpot)
            and (goals.e2el is None or self.e2el <= goals.e2el)
        )


def figures(
    outcomes: Sequence[Outcome],
    duration: float,
    goals: Goals | None,
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """Totals, rates a second and latencies in milliseconds.

    duration: seconds of the whole test. goals: of requests whose class has none; with neither,
    request_goodput is None. Latencies are those of completed requests; None: there are none.
    Failed requests reach no goal.
    """
    done = [outcome for outcome in outcomes if outcome.answer.error is None]
    latencies = [Latencies.of(outcome) for outcome in done]
    inputs = sum(outcome.answer.prompt_tokens for outcome in done)
    outputs = sum(outcome.answer.output_tokens for outcome in done)

    def rate(count: float) -> float:
        return count / duration if duration > 0 else 0.0

    wanted = [_goals(outcome, goals) for outcome in done]
    good = None
    if goals is not None or any(outcome.request.slo_class for outcome in outcomes):
        good = sum(
            want is not None and latency.reach(want)
            for latency, want in zip(latencies, wanted, strict=True)
        )
    result: dict[str, Any] = {
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": inputs,
        "total_cached_tokens": sum(outcome.answer.cached_tokens for outcome in done),
        "total_output_tokens": outputs,
        "request_throughput": rate(len(done)),
        "request_goodput": None if good is None else rate(good),
        "slo_attainment": None if good is None else good / max(1, len(outcomes)),
        "output_throughput": rate(outputs),
        "total_token_throughput": rate(inputs + outputs),
    }
    nothing = np.zeros(0)
    samples = {
        "ttft": np.array([latency.ttft for latency in latencies]),
        "tpot": np.array([latency.tpot for latency in latencies]),
        "itl": np.concatenate([nothing, *(latency.itl for latency in latencies)]),
        "e2el": np.array([latency.e2el for latency in latencies]),
    }
    for name, values in samples.items():
        result |= _distribution(name, values[~np.isnan(values)] * 1e3, percentiles)
    return result


def groups(
    outcomes: Sequence[Outcome],
    duration: float,
    goals: Goals | None,
    percentiles: Sequence[float],
) -> dict[str, dict[str, dict[str, Any]]]:
    """`figures` of each tenant and each SLO class: {"tenants": {name: ...}, "slo_classes": ...}."""
    tables: dict[str, dict[str, dict[str, Any]]] = {"tenants": {}, "slo_classes": {}}
    for table, kind in (("tenants", "tenant"), ("slo_classes", "slo_class")):
        members: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            owner = getattr(outcome.request, kind)
            if owner is not None:
                members.setdefault(owner.name, []).append(outcome)
        for name in sorted(members):
            tables[table][name] = figures(members[name], duration, goals, percentiles)
    return tables


def generator(outcomes: Sequence[Outcome], lags: Sequence[float]) -> dict[str, float]:
    """How well the generator itself did, in milliseconds.

    lateness: of requests, from when they were due until it came to them. held_back: from then until
    they were sent, for a limit of concurrency. lag: of the event loop, see `measure_lag`.
    """
    late = np.array([outcome.released - outcome.due for outcome in outcomes])
    held = np.array([outcome.sent - outcome.released for outcome in outcomes])
    result = {}
    for name, values in (("lateness", late), ("held_back", held), ("lag", np.array(lags))):
        seconds = values if len(values) else np.zeros(1)
        result[f"mean_{name}_ms"] = float(seconds.mean()) * 1e3
        result[f"p99_{name}_ms"] = float(np.percentile(seconds, 99)) * 1e3
        result[f"max_{name}_ms"] = float(seconds.max()) * 1e3
    return result


def failures(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many requests failed of each reason, the most frequent first."""
    reasons = Counter(o.answer.error for o in outcomes if o.answer.error is not None)
    return dict(reasons.most_common())


def most_at_once(outcomes: Sequence[Outcome]) -> int:
    """The most requests that were under way at one moment."""
    # Of equal times the ends come first: who ends when another is sent was not beside it.
    changes = sorted((t, d) for o in outcomes for t, d in ((o.sent, 1), (o.ended, -1)))
    return int(max(np.cumsum([change for _, change in changes]), default=0))


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """A value for each request, in seconds: what `--save-detailed` adds to a result."""
    latencies = [Latencies.of(outcome) for outcome in outcomes]
    return {
        "input_lens": [outcome.answer.prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.answer.output_tokens for outcome in outcomes],
        "ttfts": [latency.ttft for latency in latencies],
        "itls": [latency.itl.tolist() for latency in latencies],
        "generated_texts": [outcome.answer.text for outcome in outcomes],
        "errors": [outcome.answer.error or "" for outcome in outcomes],
    }


def percentile_name(percentile: float) -> str:
    """As in field names: 99.0 is "p99", 99.9 is "p99.9"."""
    return f"p{int(percentile) if percentile == int(percentile) else percentile}"


def _goals(outcome: Outcome, goals: Goals | None) -> Goals | None:
    slo_class = outcome.request.slo_class
    return goals if slo_class is None else slo_class.goals


def _distribution(
    name: str, values: Float64, percentiles: Sequence[float]
) -> dict[str, float | None]:
    some = len(values) > 0
    result = {
        f"mean_{name}_ms": float(values.mean()) if some else None,
        f"median_{name}_ms": float(np.median(values)) if some else None,
        f"std_{name}_ms": float(values.std()) if some else None,
    }
    for percentile in percentiles:
        field = f"{percentile_name(percentile)}_{name}_ms"
        result[field] = float(np.percentile(values, percentile)) if some else None
    return result
