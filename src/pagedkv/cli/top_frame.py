"""What `pagedkv top` shows: a dashboard's data as lines of a terminal."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pagedkv.cache.survey import STATES
from pagedkv.cli.units import format_time

_LATE = 1.5  # seconds after which a picture is not of now
_KEPT = 60  # seconds of the curves
_FEWEST_LINES = 8  # of a table, where there is no terminal whose height could be filled
_MAP_LINES = 8
_RANGES = 8
_NUMBERS = re.compile(r"(#\d+)+(@\d+)?$")
_BARS = "▁▂▃▄▅▆▇█"
# For each state a sign that can be told from the others without its colour.
_SIGNS = MappingProxyType(
    {
        "free": ("·", "bright_black"),
        "cached": ("░", "blue"),
        "held": ("█", "bright_blue"),
        "shared": ("▓", "yellow"),
        "draining": ("▒", "magenta"),
    }
)


class View:
    """The last data of a server, put together from answers that leave out what has not changed.

    trouble: why there is no newer one; "" if there is. tag, last, run: what is here, for the next
    question.
    """

    def __init__(self, url: str) -> None:
        self.url, self.trouble = url, ""
        self.tag, self.run, self.last = "", "", -1
        self.data: dict[str, Any] = {}
        self.states: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.columns: dict[str, list[float | None]] = {}

    def take(self, data: dict[str, Any]) -> None:
        """KeyError, TypeError, ValueError: it is no data of a dashboard."""
        pool = data["picture"]["pool"]
        if "states" in pool:
            self.states = np.frombuffer(base64.b64decode(pool["states"]), np.uint8)
        if data["run"] != self.run:
            self.columns = {}
        new = data["history"]["columns"]
        known = [second for second in self.columns.get("second", []) if second is not None]
        keep = sum(second < min(new["second"], default=np.inf) for second in known)
        self.columns = {
            name: [*self.columns.get(name, [])[:keep], *values][-_KEPT:]
            for name, values in new.items()
        }
        self.tag, self.run, self.last = pool["tag"], data["run"], data["history"]["last"]
        self.data, self.trouble = data, ""


def frame(view: View, width: int, height: int | None) -> RenderableType:
    """Of `width` columns and at most `height` lines; None: as many as it takes."""
    data = view.data
    picture, pool = data["picture"], data["picture"]["pool"]
    tenants, decisions = data["tenants"], list(reversed(picture["decisions"]))
    above = [
        _headline(view),
        *_figures(data, width),
        Text(),
        *_map(view.states, width, _MAP_LINES),
        _legend(pool),
        Text(),
        _curves(view, width),
    ]
    rows = picture["sequences"]
    workers = data["workers"]
    wanted = [len(rows), len(tenants), len(decisions), len(workers)]
    taken = len(above) + 3 + 2 * (4 if workers else 3)
    shares = _shares(wanted, None if height is None else height - taken)
    below: list[RenderableType] = []
    if shares[0]:
        title = f"Running sequences: {len(rows)}, waiting requests: {picture['waiting']['count']}"
        below += [Text(), Text(title, style="bold"), _sequences(rows[: shares[0]], width)]
    if shares[3]:
        below += [Text(), _workers(workers[: shares[3]])]
    if shares[1]:
        below += [Text(), _tenants(tenants[: shares[1]])]
    if shares[2]:
        below += [Text(), Text("Last decisions", style="bold")]
        below += [_decision(entry, data["now"], width) for entry in decisions[: shares[2]]]
    if not rows:
        below = [Text(), Text("No request is running.", style="bright_black"), *below]
    return Group(*above, *below)


def plain(text: object) -> str:
    """Text of others, without what would steer the terminal."""
    return "".join(sign if sign.isprintable() else "�" for sign in str(text))


def _name(request: str) -> str:
    """As the client knows it: the core's name has numbers behind it."""
    return plain(_NUMBERS.sub("", request))


def _headline(view: View) -> Text:
    server, age = view.data["server"], view.data["now"] - view.data["taken"]
    state = ("draining", "yellow") if server["draining"] else ("live", "green")
    if age > _LATE:
        state = (f"in a step; the blocks are of {format_time(age)} ago", "yellow")
    line = Text.assemble(("pagedkv ", "bold"), plain(server["model"]), "  ", view.url, "  ", state)
    if view.trouble:
        line = Text.assemble(("pagedkv ", "bold"), (plain(view.trouble), "red"))
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _figures(data: dict[str, Any], width: int) -> list[Text]:
    recent, picture = data["recent"], data["picture"]
    numbers, total = picture["pool"]["numbers"], picture["pool"]["num_blocks"]
    held = numbers["held"] + numbers["shared"]
    first, between = (_times(recent, name) for name in ("ttft", "itl"))
    pairs = [
        ("pool", f"{held / total:.0%}"),
        ("running", f"{len(picture['sequences']):,}"),
        ("waiting", f"{picture['waiting']['count']:,}"),
        ("tokens/s", f"{recent['tokens_per_second']:,.0f}"),
        ("first token", first),
        ("between", between),
        ("empty in tails", f"{recent['waste']:.1%}"),
        ("preempted", f"{recent['preemptions']:,}/min"),
    ]
    lines = [Text(no_wrap=True, overflow="ellipsis")]
    for name, value in pairs:
        if lines[-1] and len(lines[-1]) + len(name) + len(value) + 3 > width:
            lines.append(Text(no_wrap=True, overflow="ellipsis"))
        lines[-1].append("  " if lines[-1] else "")
        lines[-1].append(f"{name} ", "bright_black").append(value, "bold")
    return lines


def _times(recent: dict[str, Any], name: str) -> str:
    median, p99 = recent[f"{name}_p50"], recent[f"{name}_p99"]
    return "–" if median is None else f"{format_time(median)} (P99 {format_time(p99)})"


def _map(states: npt.NDArray[np.uint8], width: int, lines: int) -> list[Text]:
    """A sign for as many blocks that follow each other as it takes; the state of most of them."""
    each = max(1, -(-len(states) // (width * lines)))
    padded = np.full(-(-len(states) // each) * each, len(STATES), np.uint8)
    padded[: len(states)] = states
    groups = padded.reshape(-1, each)
    # Of equal numbers the last: what is in use counts for more than what is free.
    tallies = np.stack([(groups == state).sum(axis=1) for state in range(len(STATES))][::-1])
    most = len(STATES) - 1 - tallies.argmax(axis=0)
    rows = [most[start : start + width] for start in range(0, len(most), width)]
    return [_line_of_map(row.tolist()) for row in rows]


def _line_of_map(states: Sequence[int]) -> Text:
    line = Text(no_wrap=True)
    changes = [i for i, (one, other) in enumerate(pairwise(states), 1) if one != other]
    for start, stop in pairwise([0, *changes, len(states)]):
        sign, style = _SIGNS[STATES[states[start]]]
        line.append(sign * (stop - start), style)
    return line


def _legend(pool: dict[str, Any]) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{pool['num_blocks']:,} blocks of {pool['block_size']}   ", "bright_black")
    for state, (sign, style) in _SIGNS.items():
        line.append(sign, style).append(f" {state} {pool['numbers'][state]:,}   ")
    return line


def _curves(view: View, width: int) -> Text:
    """The last minute of queue and latencies, a bar a second."""
    line = Text(no_wrap=True, overflow="ellipsis")
    each = max(5, min(_KEPT, width // 3 - 14))
    for label, name in (("waiting", "waiting"), ("TTFT", "ttft_p50"), ("ITL", "itl_p50")):
        line.append(f"{label} ", "bright_black").append(curve(view.columns[name][-each:]))
        line.append("   ")
    return line


def curve(values: Sequence[float | None]) -> str:
    """A bar a value, as high as its share of the largest; a blank where there is none."""
    most = max((value for value in values if value is not None), default=0.0) or 1.0
    return "".join(
        " " if value is None else _BARS[round(value / most * (len(_BARS) - 1))] for value in values
    )


def _shares(wanted: Sequence[int], room: int | None) -> list[int]:
    """Lines for each table; the room that one leaves is the others'."""
    if room is None:
        return [min(lines, _FEWEST_LINES) for lines in wanted]
    shares, rest = [0] * len(wanted), max(0, room)
    while rest and shares != list(wanted):
        for i, lines in enumerate(wanted):
            if shares[i] < lines and rest:
                shares[i] += 1
                rest -= 1
    return shares


def _sequences(rows: Iterable[dict[str, Any]], width: int) -> Table:
    table = _table("Request", "Tenant", "State", ">Tokens", ">Cached", ">Blocks", "Block table")
    for row in rows:
        samples = row["samples"]
        name = _name(row["request"]) + ("" if samples == [0] else f" {samples}")
        ids = np.frombuffer(base64.b64decode(row["blocks"]), "<i4").tolist()
        table.add_row(
            _cell(name, width // 5),
            _cell("–" if row["tenant"] is None else plain(row["tenant"]), width // 8),
            row["state"],
            f"{row['tokens']:,}",
            f"{row['cached_tokens']:,}",
            f"{row['num_blocks']:,}",
            Text(ranges(ids, _RANGES), no_wrap=True, overflow="ellipsis", style="bright_black"),
        )
    return table


def _tenants(tenants: Iterable[dict[str, Any]]) -> Table:
    heads = ("Tenant", ">Weight", ">Run", ">Wait", ">Blocks", ">Prompt", ">Output", ">Last minute")
    table = _table(*heads)
    for row in tenants:
        keys = ("running", "waiting", "blocks", "prompt_tokens", "output_tokens", "recent")
        numbers = [f"{row['weight']:g}", *(f"{row[key]:,}" for key in keys)]
        table.add_row(_cell("–" if row["tenant"] is None else plain(row["tenant"]), 30), *numbers)
    return table


def _workers(workers: list[dict[str, Any]]) -> Table:
    table = _table("Worker", "Role", "State", ">Run", ">Wait", ">Blocks", ">Held", ">Restarts")
    for worker in workers:
        numbers = ("running", "waiting", "blocks", "blocks_held", "restarts")
        table.add_row(
            worker["name"], worker["role"], worker["state"], *(str(worker[n]) for n in numbers)
        )
    return table


def _table(*heads: str) -> Table:
    """Columns whose heads begin with ">" have numbers: they keep their width when room is short."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for head in heads:
        right = head.startswith(">")
        table.add_column(head.lstrip(">"), justify="right" if right else "left", no_wrap=right)
    return table


def _cell(text: str, most: int) -> Text:
    """A long one without its middle: what tells names apart is mostly at their ends."""
    most = max(8, most)
    if len(text) > most:
        end = most // 3
        text = f"{text[: most - end - 1]}…{text[-end:]}"
    return Text(text, no_wrap=True, overflow="ellipsis")


def _decision(entry: dict[str, Any], now: float, width: int) -> Text:
    line = Text(f"{max(0.0, now - entry['now']):6.1f} s ago  ", "bright_black", no_wrap=True)
    if entry["request"]:
        line.append_text(_cell(_name(entry["request"]), width // 4).append(" "))
    line.append(plain(entry["words"]), "default")
    line.truncate(width, overflow="ellipsis")
    return line


def ranges(ids: Sequence[int], most: int) -> str:
    """Block ids that follow each other in one piece: [4, 5, 6, 9] is "4-6, 9"."""
    starts = [i for i in range(len(ids)) if i == 0 or ids[i] != ids[i - 1] + 1]
    pieces = []
    for start, stop in list(pairwise([*starts, len(ids)]))[:most]:
        first, last = ids[start], ids[stop - 1]
        pieces.append(f"{first}-{last}" if last > first else f"{first}")
    return ", ".join([*pieces, "…"] if len(starts) > most else pieces)
