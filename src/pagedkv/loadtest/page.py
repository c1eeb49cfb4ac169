"""A load test as one HTML page with plots, or the plots alone as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pagedkv.loadtest.metrics import Latencies
from pagedkv.loadtest.run import LoadRun
from pagedkv.simulation import charts
from pagedkv.simulation.report import POINTS, page
from pagedkv.simulation.workload import Float64

Figure = tuple[str, str, str]  # heading, SVG, caption


def load_page(run: LoadRun, facts: Mapping[str, str]) -> str:
    """The page: latencies, requests under way, tokens a second, lateness of the generator.

    facts: what to print above the plots. MissingExtraError without matplotlib.
    """
    done = [outcome for outcome in run.outcomes if outcome.answer.error is None]
    latencies = [Latencies.of(outcome) for outcome in done]
    figures: list[Figure] = []
    for name, unit, scale in (("ttft", "s", 1.0), ("tpot", "ms", 1e3), ("e2el", "s", 1.0)):
        values = np.array([getattr(latency, name) for latency in latencies]) * scale
        values = np.sort(values[~np.isnan(values)])
        if len(values):
            figures.append(_distribution(name.upper(), unit, values))
    if run.duration > 0:
        figures += [_under_way(run), _tokens(run), _lateness(run)]
    return page("Load test", facts, figures)


def _distribution(name: str, unit: str, values: Float64) -> Figure:
    """values: sorted, not empty."""
    shares = np.linspace(0.0, 1.0, POINTS + 1)
    points = np.quantile(values, shares)
    marks = ", ".join(f"P{p} {np.percentile(values, p):.3g} {unit}" for p in (50, 90, 99))
    log = bool(points[0] > 0)
    svg = charts.lines([(name, points, shares)], f"{name} in {unit}", "share", log_x=log)
    return name, svg, f"{len(values):,} requests: {marks}."


def _under_way(run: LoadRun) -> Figure:
    """Requests due, sent and ended, so far."""
    moments = np.linspace(0.0, run.duration, POINTS + 1)
    data = [
        (name, moments, _counts([getattr(o, field) - run.start for o in run.outcomes], moments))
        for name, field in (("due", "due"), ("sent", "sent"), ("ended", "ended"))
    ]
    caption = "Requests so far. What lies between sent and ended is under way."
    return "Requests", charts.lines(data, "seconds", "requests"), caption


def _tokens(run: LoadRun) -> Figure:
    """Each chunk of an answer stands for an equal part of its tokens."""
    times, weights = [], []
    for outcome in run.outcomes:
        answer = outcome.answer
        for moment in answer.times:
            times.append(moment - run.start)
            weights.append(answer.output_tokens / len(answer.times))
    edges = np.linspace(0.0, run.duration, min(POINTS, 100) + 1)
    sums, _ = np.histogram(times, edges, weights=weights)
    svg = charts.lines(
        [("tokens a second", edges, sums / np.diff(edges))], "seconds", "tokens/s", steps=True
    )
    return "Output", svg, "Output tokens a second, when their chunks came."


def _lateness(run: LoadRun) -> Figure:
    moments = np.array([outcome.due - run.start for outcome in run.outcomes])
    late = np.array([outcome.released - outcome.due for outcome in run.outcomes]) * 1e3
    edges = np.linspace(0.0, run.duration, min(POINTS, 100) + 1)
    worst = np.zeros(len(edges) - 1)
    places = np.clip(np.searchsorted(edges, moments, "right") - 1, 0, len(worst) - 1)
    np.maximum.at(worst, places, late)
    svg = charts.lines([("lateness", edges, worst)], "seconds", "ms", steps=True)
    caption = "By how much the generator came too late to requests that were due: the worst."
    return "The generator", svg, caption


def _counts(times: Sequence[float], moments: Float64) -> Float64:
    return np.searchsorted(np.sort(times), moments, "right").astype(np.float64)
