"""A simulated run as one HTML page with plots: no script, nothing from the network."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

import numpy as np

from pagedkv.scheduling.policies.fair import OUTPUT_WEIGHT, PROMPT_WEIGHT
from pagedkv.simulation import charts
from pagedkv.simulation.account import Account
from pagedkv.simulation.serve import Float64, SimulatedRun

POINTS = 400  # of a line over time
_NAMED, _DRAWN = 6, 60  # tenants with a colour, tenants with a line

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; } td { padding: .15em 1.2em .15em 0; }
td:first-child, figcaption { color: #555; } figure { margin: 2em 0; } svg { max-width: 100%; }
"""


def page(title: str, facts: Mapping[str, str], figures: Sequence[tuple[str, str, str]]) -> str:
    """An HTML document. figures: heading, SVG, caption. Text is escaped here, SVG is not."""
    text = html.escape
    rows = "\n".join(
        f"<tr><td>{text(name)}</td><td>{text(value)}</td></tr>" for name, value in facts.items()
    )
    body = "\n".join(
        f"<figure>\n<h2>{text(heading)}</h2>\n{svg}<figcaption>{text(caption)}</figcaption>\n"
        "</figure>"
        for heading, svg, caption in figures
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{text(title)}</h1>\n<table>\n{rows}\n</table>\n{body}\n</body>\n</html>\n"
    )


def serve_report(run: SimulatedRun, facts: Mapping[str, str]) -> str:
    """The page of a run of `serve`: memory, latencies, service, preemptions.

    facts: what to print above the plots. MissingExtraError without matplotlib.
    """
    figures = []
    if run.steps:
        figures += [_memory(run), _occupancy(run), _preemptions(run)]
    for name, unit, scale in (("ttft", "s", 1.0), ("tpot", "ms", 1e3)):
        values = np.array([getattr(request, name) for request in run.requests]) * scale
        values = np.sort(values[~np.isnan(values)])
        if len(values):
            figures.append(_distribution(name.upper(), unit, values))
    if any(run.served.values()):
        figures.append(_service(run))
    return page("Simulated serving", facts, figures)


def allocators_report(accounts: Mapping[str, Account], step_seconds: float) -> str:
    """The page of a run of `run_allocators`: waste, holes and live tokens over time.

    MissingExtraError without matplotlib.
    """
    facts = {}
    shares: dict[str, dict[str, float]] = {}
    for name, account in accounts.items():
        numbers = account.report()
        live, vain = numbers["utilisation"], numbers["internal_waste"]
        lost = numbers["external_waste"]
        shares[name] = {
            "live": live,
            "reserved in vain": vain,
            "lost in holes": lost,
            "free": 1 - live - vain - lost,
        }
        facts[name] = (
            f"{numbers['mean_resident']:.1f} resident, {numbers['steps']:,.0f} steps, "
            f"{numbers['refused_while_free_sufficed']:,.0f} refusals for holes, "
            f"{numbers['tokens_moved']:,.0f} tokens moved, "
            f"{numbers['tokens_restored']:,.0f} restored"
        )
    moments = {name: _moments(account, step_seconds) for name, account in accounts.items()}
    live_lines = [(name, table[:, 0], table[:, 1]) for name, table in moments.items() if len(table)]
    hole_lines = [
        (name, table[:, 0], table[:, 4])
        for name, table in moments.items()
        if len(table) and table[:, 3].any()
    ]
    figures = [
        (
            "The pool",
            charts.bars(shares, "share of the slots, mean over steps"),
            "Lost in holes: slots that were free, and would have sufficed for a request that was "
            "refused.",
        )
    ]
    for heading, data, caption in (
        ("Live tokens", live_lines, "Tokens of resident requests, in slots of the pool."),
        ("The largest hole", hole_lines, "The most that one more request could reserve, in slots."),
    ):
        if data:
            figures.append((heading, charts.lines(data, "seconds", "slots"), caption))
    return page("Allocators side by side", facts, figures)


def _moments(account: Account, step_seconds: float) -> Float64:
    """[n, 5]: seconds, live, reserved, holes, the largest of them."""
    table = np.array(account.history, np.float64).reshape(-1, 5)
    table[:, 0] *= step_seconds
    return table


def over_time(run: SimulatedRun, values: Float64, idle: Float64) -> tuple[Float64, Float64]:
    """Time averages of what holds while steps run.

    values: [steps], of each step. idle: [steps], from its end to the start of the next one.
    Returns the edges of at most POINTS equal spans, in seconds, and the exact mean in each.
    """
    starts = np.array([step.now for step in run.steps])
    ends = starts + np.array([step.duration for step in run.steps])
    # A step and the pause after it, in turns; the last one has no pause.
    times = np.append(np.column_stack([starts, ends]).ravel(), ends[-1])
    heights = np.column_stack([values, idle]).ravel()
    integral = np.concatenate([[0.0], np.cumsum(np.diff(times) * heights)])
    edges = np.linspace(times[0], times[-1], min(POINTS, len(starts)) + 1)
    sums = np.diff(np.interp(edges, times, integral))
    return edges, np.divide(sums, np.diff(edges), out=np.zeros(len(sums)), where=sums > 0)


def _column(run: SimulatedRun, name: str) -> Float64:
    return np.array([getattr(step, name) for step in run.steps], np.float64)


def memory_over_time(run: SimulatedRun) -> tuple[Float64, dict[str, Float64]]:
    """Edges as of `over_time`, and slots by what they are: together the whole pool.

    Held slots are those of running steps, filled or not; no slot is held while no step runs.
    """
    size, total = run.block_size, float(run.num_blocks * run.block_size)
    filled = _column(run, "slots_filled")
    waste = _column(run, "blocks_peak") * size - filled
    cached = _column(run, "blocks_cached") * size
    nothing = np.zeros(len(run.steps))
    # What a step leaves as cached was in part held while it ran.
    while_running = np.minimum(cached, total - filled - waste)
    layers: dict[str, Float64] = {}
    for name, values, idle in (
        ("held, filled", filled, nothing),
        ("held, tail waste", waste, nothing),
        ("cached", while_running, cached),
        ("free", total - filled - waste - while_running, total - cached),
    ):
        edges, layers[name] = over_time(run, values, idle)
    return edges, layers


def _memory(run: SimulatedRun) -> tuple[str, str, str]:
    edges, layers = memory_over_time(run)
    return (
        "Memory",
        charts.areas(edges, layers, "seconds", "slots"),
        "Slots of the pool while steps ran. Tail waste: slots of held blocks that no token fills.",
    )


def _occupancy(run: SimulatedRun) -> tuple[str, str, str]:
    nothing = np.zeros(len(run.steps))
    data = [
        (name, *over_time(run, _column(run, f"num_{name}"), nothing))
        for name in ("running", "waiting")
    ]
    return (
        "Requests",
        charts.lines(data, "seconds", "requests", steps=True),
        "Requests that run and that wait, after each step.",
    )


def _preemptions(run: SimulatedRun) -> tuple[str, str, str]:
    times = _column(run, "now")
    total = np.cumsum(_column(run, "num_preempted"))
    edges = np.linspace(times[0], times[-1], min(POINTS, len(times)))
    heights = total[np.searchsorted(times, edges, side="right") - 1]
    return (
        "Preemptions",
        charts.lines([("preemptions", edges, heights)], "seconds", "preemptions so far"),
        f"{run.preemptions:,} in all.",
    )


def _distribution(name: str, unit: str, values: Float64) -> tuple[str, str, str]:
    """values: sorted, not empty."""
    shares = np.linspace(0.0, 1.0, POINTS + 1)
    points = np.quantile(values, shares)
    marks = ", ".join(f"P{p} {np.percentile(values, p):.3g} {unit}" for p in (50, 90, 99))
    log = bool(points[0] > 0)
    return (
        name,
        charts.lines([(name, points, shares)], f"{name} in {unit}", "share of requests", log_x=log),
        f"{len(values):,} requests: {marks}.",
    )


def _service(run: SimulatedRun) -> tuple[str, str, str]:
    """Service so far, by tenant."""
    first, last = min(run.served), max(run.served)
    edges = np.linspace(first, last + 1, min(POINTS, last - first + 1) + 1)
    spans: dict[str | None, Float64] = {}
    for second, tenants in run.served.items():
        place = int(np.searchsorted(edges, second, side="right"))
        for tenant, served in tenants.items():
            heights = spans.setdefault(tenant, np.zeros(len(edges)))
            heights[place] += PROMPT_WEIGHT * served.prompt + OUTPUT_WEIGHT * served.output
    totals = sorted(
        ((tenant, np.cumsum(heights)) for tenant, heights in spans.items()),
        key=lambda item: (-item[1][-1], str(item[0])),
    )
    named = [(_name(tenant), edges, line) for tenant, line in totals[:_NAMED]]
    faint = [(edges, line) for _, line in totals[_NAMED:_DRAWN]]
    caption = (
        f"Tokens served to each tenant so far: a prompt token counts {PROMPT_WEIGHT:g}, when its "
        f"request's first token is out, an output token {OUTPUT_WEIGHT:g}."
    )
    if len(totals) > _NAMED:
        caption += f" In colour the {_NAMED} of {len(totals)} tenants who were served most."
    if len(totals) > _DRAWN:
        caption += f" {_DRAWN} of them are drawn."
    svg = charts.lines(named, "seconds", "service", faint=faint)
    return "Service of each tenant", svg, caption


def _name(tenant: str | None) -> str:
    """As a legend has room for it; a page may not have control characters."""
    if tenant is None:
        return "all"
    shown = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in tenant
    )
    return shown if len(shown) <= 24 else shown[:23] + "…"
