"""Victims swapped or recomputed by measured cost, on links that make one or the other better."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.errors import ConfigError
from pagedkv.simulation.executor import LinearCost
from pagedkv.simulation.link import Link
from pagedkv.simulation.serve import Server, serve
from pagedkv.simulation.trace import Trace

COST = LinearCost(2e-3, 30e-6, 0.0, 20e-9)
BLOCK_BYTES = 16 * 128 * 1024


def run(recovery: str, bandwidth: float, caching: bool = False):
    rng = np.random.default_rng(0)
    prompts, outputs = rng.integers(64, 200, 40), rng.integers(100, 300, 40)
    link = Link(10_000, BLOCK_BYTES, bandwidth, 20e-6)
    server = Server(150, 16, 64, 2048, prefix_caching=caching, link=link, recovery=recovery)
    return serve(Trace(None, prompts, outputs, None, None, None), server, COST)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("bandwidth", [1e9, 8e9, 64e9])
def test_the_choice_is_as_good_as_the_better_fixed_way(bandwidth: float, caching: bool) -> None:
    swap, recompute, auto = (run(r, bandwidth, caching) for r in ("swap", "recompute", "auto"))
    assert auto.preemptions > 0
    assert all(request.reason == "length" for request in auto.requests)
    # What is tried before a link has been measured costs more in so short a run.
    assert auto.seconds <= 1.15 * min(swap.seconds, recompute.seconds)


def test_the_two_ways_cross() -> None:
    """Else the test above would show nothing."""
    assert run("swap", 1e9).seconds > 1.2 * run("recompute", 1e9).seconds
    assert run("swap", 64e9).seconds < run("recompute", 64e9).seconds


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ((0, 1, 1.0), "host_blocks"),
        ((1, 0, 1.0), "block_bytes"),
        ((1, 1, 0.0), "bytes_per_second"),
        ((1, 1, float("nan")), "bytes_per_second"),
        ((1, 1, 1.0, -1.0), "per_piece"),
    ],
)
def test_links_that_cannot_be_are_refused(values: tuple, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Link(*values)


def test_an_unknown_recovery_is_refused() -> None:
    with pytest.raises(ConfigError, match="recovery='magic'"):
        run("magic", 1e9)
