"""Reports: exact averages, one page of its own, and text of outsiders as text."""

from __future__ import annotations

import re
import sys
import warnings
from html.parser import HTMLParser

import numpy as np
import pytest

from pagedkv.errors import MissingExtraError
from pagedkv.simulation.allocators import run_allocators
from pagedkv.simulation.charts import require_matplotlib
from pagedkv.simulation.executor import LinearCost
from pagedkv.simulation.report import (
    POINTS,
    allocators_report,
    memory_over_time,
    over_time,
    page,
    serve_report,
)
from pagedkv.simulation.serve import Server, SimulatedRun, serve
from pagedkv.simulation.trace import Trace
from pagedkv.simulation.workload import make_trace

COST = LinearCost(0.01, 0.001, 0.00001)
HEADINGS = [
    "Memory",
    "Requests",
    "Preemptions",
    "TTFT",
    "TPOT",
    "Service of each tenant",
]


def overloaded(tenants: tuple[str, ...] | None = None) -> SimulatedRun:
    invented = make_trace(60, 20.0, 30, 20, seed=3)
    trace = Trace(
        invented.arrivals, invented.prompt_tokens, invented.output_tokens, tenants, None, None
    )
    return serve(trace, Server(40, 4, max_num_seqs=8, max_num_batched_tokens=32), COST)


class Outline(HTMLParser):
    """Headings, and every attribute that could fetch something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.tags: set[str] = set()
        self.targets: list[str] = []
        self._in_heading = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._in_heading = tag == "h2"
        self.targets += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")
        ]

    def handle_data(self, data: str) -> None:
        if self._in_heading:
            self.headings.append(data)
        self._in_heading = False


def test_the_page_has_every_plot_and_fetches_nothing() -> None:
    text = serve_report(overloaded(), {"requests": "60"})
    outline = Outline(text)
    assert outline.headings == HEADINGS
    assert text.count("<svg") == len(HEADINGS)
    assert not outline.tags & {"script", "link", "img", "iframe", "object", "image"}
    assert all(target.startswith("#") for target in outline.targets)
    assert not re.findall(r"url\((?!#)|@import", text)
    # Names of formats are all that looks like an address.
    assert set(re.findall(r"https?://[^\"'\s]*", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_equal_runs_give_equal_pages() -> None:
    assert serve_report(overloaded(), {}) == serve_report(overloaded(), {})


def test_names_of_tenants_are_text() -> None:
    names = ("<script>alert(1)</script>", "$x^2$", "_hidden", "a" * 80, "\0\n\x1b", "日本")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no font has every letter
        text = serve_report(overloaded(tuple(names[i % 6] for i in range(60))), {"<b>": "&"})
    assert not {"\0", "\x1b"} & set(text)
    assert ">日本<" in text
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert ">$x^2$<" in text
    assert ">_hidden<" in text
    assert "a" * 24 not in text
    assert "<td>&lt;b&gt;</td><td>&amp;</td>" in text


def test_many_tenants_are_drawn_and_some_of_them_named() -> None:
    text = serve_report(overloaded(tuple(f"tenant {i}" for i in range(60))), {})
    assert len(re.findall(r">tenant \d+<", text)) == 6
    assert re.search(r"In colour the 6 of \d+ tenants", text)


def test_a_run_in_which_nothing_ran_has_a_page() -> None:
    trace = Trace(None, np.array([100]), np.array([1]), None, None, None)
    assert Outline(serve_report(serve(trace, Server(4, 4), COST), {})).headings == []


def test_memory_is_the_whole_pool_at_every_time() -> None:
    run = overloaded()
    edges, layers = memory_over_time(run)
    assert len(edges) == min(POINTS, len(run.steps)) + 1
    assert sum(layers.values()) == pytest.approx(np.full(len(edges) - 1, 160.0))
    assert all((layer >= -1e-9).all() for layer in layers.values())
    held = layers["held, filled"] + layers["held, tail waste"]
    busy = sum(step.blocks_peak * 4 * step.duration for step in run.steps)
    assert held.sum() * (edges[1] - edges[0]) == pytest.approx(busy)


def test_an_average_counts_the_pauses() -> None:
    trace = Trace(np.array([0.0, 10.0]), np.array([4, 4]), np.array([1, 1]), None, None, None)
    run = serve(trace, Server(4, 4), LinearCost(1.0, 0.0))
    # Two steps of one second with nine seconds between, in two spans of 5.5 seconds.
    edges, means = over_time(run, np.array([11.0, 22.0]), np.array([1.0, 5.0]))
    assert edges.tolist() == [0.0, 5.5, 11.0]
    assert means == pytest.approx([(11 + 4.5) / 5.5, (4.5 + 22) / 5.5])


def test_service_counts_every_token_once() -> None:
    run = overloaded(("a", "b") * 30)
    for tenant in "ab":
        mine = [r for r in run.requests if r.tenant == tenant]
        served = [second[tenant] for second in run.served.values() if tenant in second]
        assert sum(c.prompt for c in served) == sum(r.prompt_tokens for r in mine if r.tokens)
        assert sum(c.output for c in served) == sum(r.tokens for r in mine)


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r'pip install "pagedkv\[report\]"'):
        require_matplotlib()


def test_text_of_a_page_is_escaped() -> None:
    text = page("a < b", {}, [("h & h", "<svg/>", "c > d")])
    assert "<h1>a &lt; b</h1>" in text
    assert "<h2>h &amp; h</h2>" in text
    assert "<figcaption>c &gt; d</figcaption>" in text


def test_the_page_of_the_allocators() -> None:
    trace = make_trace(60, 20.0, 30, 20, seed=3)
    text = allocators_report(run_allocators(trace, 400, 4), 0.05)
    outline = Outline(text)
    assert outline.headings == ["The pool", "Live tokens", "The largest hole"]
    assert not outline.tags & {"script", "link", "img", "iframe", "object", "image"}
    assert text.count(">oracle, compacting<") == 4  # a row, and three legends or labels
