"""Several workers under one virtual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedkv.errors import ConfigError
from pagedkv.simulation.cluster import ClusterShape, serve_cluster
from pagedkv.simulation.executor import LinearCost
from pagedkv.simulation.objective import Objective
from pagedkv.simulation.serve import Server, serve
from pagedkv.simulation.workload import make_trace

SERVER = Server(num_blocks=300, max_num_seqs=16, max_num_batched_tokens=256)
COST = LinearCost(0.01, 1e-4)
TRACE = make_trace(120, rate=8.0, prompt_tokens=100, output_tokens=30, seed=3)


def test_one_worker_is_a_server():
    """A step's messages are those that are there when it starts, alone or in a cluster."""
    alone = serve(TRACE, SERVER, COST)
    cluster = serve_cluster(TRACE, ClusterShape(SERVER, 1), COST)
    assert cluster.requests == alone.requests
    assert cluster.workers[0].steps == len(alone.steps)


def test_workers_share_the_load():
    run = serve_cluster(TRACE.at_speed(4.0), ClusterShape(SERVER, 4), COST)
    assert all(r.reason == "length" for r in run.requests)
    assert [r.tokens for r in run.requests] == [max(1, n) for n in TRACE.output_tokens.tolist()]
    counts = [worker.requests for worker in run.workers]
    assert sum(counts) == len(TRACE)
    assert min(counts) > 15
    objective = Objective(0.2, 0.02)
    one = serve_cluster(TRACE.at_speed(4.0), ClusterShape(SERVER, 1), COST)
    assert run.attainment(objective) > one.attainment(objective) + 0.2


def test_equal_inputs_give_equal_runs():
    runs = [serve_cluster(TRACE, ClusterShape(SERVER, 3), COST) for _ in range(2)]
    assert runs[0] == runs[1]


def test_what_cannot_be():
    with pytest.raises(ConfigError, match="workers=0"):
        ClusterShape(SERVER, 0)
    with pytest.raises(ConfigError, match="block_size=0"):
        serve_cluster(TRACE, ClusterShape(replace(SERVER, block_size=0), 2), COST)
