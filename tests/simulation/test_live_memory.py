"""On the live pool hardly a slot is held in vain: measured on prefixes of real traces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagedkv.simulation.executor import LinearCost
from pagedkv.simulation.serve import Server, serve
from pagedkv.simulation.trace import Trace, read_trace
from pagedkv.simulation.utilisation import utilisation
from pagedkv.simulation.workload import make_trace

BAR = 0.04
COST = LinearCost(19.9e-3, 101.9e-6, 0.63e-6)
TRACES = os.environ.get("PAGEDKV_TRACES")


def waste(trace: Trace, block_size: int = 16) -> float:
    """Unfilled slots / held slots, mean over the steps, in a pool that is too small for all."""
    longest = int((trace.prompt_tokens + trace.output_tokens).max())
    server = Server(2 * longest // block_size, block_size, max_model_len=longest)
    return serve(trace, server, COST).mean_waste


@pytest.mark.skipif(TRACES is None, reason="no traces: set PAGEDKV_TRACES")
@pytest.mark.parametrize(
    ("name", "requests"),
    [
        ("azure2023_conv.csv", 80),
        ("mooncake_conversation.csv", 15),
        ("vtc_arena_27tenants.csv", 100),
        ("agent_sessions.csv", 40),
        ("lengths_sharegpt8k.csv", 40),
        ("lengths_arxiv_summ.csv", 40),
    ],
)
def test_waste_is_under_four_per_cent(name: str, requests: int) -> None:
    trace = read_trace(Path(str(TRACES)) / name).first(requests)
    assert 0 < waste(trace) < BAR
    reserved = utilisation(trace, [16])
    assert 1 - reserved.max > BAR and 1 - reserved.pow2 > 1 - reserved.paged[16]


def test_large_blocks_waste_more_than_the_bar() -> None:
    trace = make_trace(60, 20.0, 100, 60, seed=1)
    assert waste(trace, 16) < waste(trace, 64)
    assert waste(trace, 64) > BAR
