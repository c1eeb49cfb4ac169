"""Several workers under one virtual clock, with the real router and the real machines."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simulated import all_served, nothing_leaks

from pagedkv.errors import ConfigError
from pagedkv.simulation.cluster import ClusterShape, serve_cluster
from pagedkv.simulation.executor import LinearCost
from pagedkv.simulation.network import LinkModel
from pagedkv.simulation.objective import Objective
from pagedkv.simulation.perf_tables import read_cost
from pagedkv.simulation.serve import Server, serve
from pagedkv.simulation.trace import Trace
from pagedkv.simulation.workload import LengthTable, Poisson, invent, make_trace

SERVER = Server(num_blocks=300, max_num_seqs=16, max_num_batched_tokens=256)
COST = LinearCost(0.01, 1e-4)
TRACE = make_trace(120, rate=8.0, prompt_tokens=100, output_tokens=30, seed=3)


def test_one_worker_is_a_server():
    """A step's messages are those that are there when it starts, alone or in a cluster."""
    alone = serve(TRACE, SERVER, COST)
    cluster = serve_cluster(TRACE, ClusterShape(SERVER, 1), COST)
    assert cluster.requests == alone.requests
    assert cluster.workers[0].steps == len(alone.steps)


def test_workers_share_the_load(workers):
    run = serve_cluster(TRACE.at_speed(4.0), ClusterShape(SERVER, 4), COST)
    all_served(run, TRACE)
    nothing_leaks(workers)
    counts = [worker.requests for worker in run.workers]
    assert sum(counts) == len(TRACE)
    assert min(counts) > 15
    objective = Objective(0.2, 0.02)
    one = serve_cluster(TRACE.at_speed(4.0), ClusterShape(SERVER, 1), COST)
    assert run.attainment(objective) > one.attainment(objective) + 0.2


def test_prefilled_requests_go_on_elsewhere_and_nothing_is_computed_again(workers):
    run = serve_cluster(TRACE, ClusterShape(SERVER, prefill=1, decode=2), COST)
    all_served(run, TRACE)
    nothing_leaks(workers)
    moved = int((TRACE.output_tokens > 1).sum())
    assert run.moves.received == moved
    assert run.moves.failed == 0
    # Every block of every prompt is sent, once.
    longer = TRACE.prompt_tokens[TRACE.output_tokens > 1]
    assert run.moves.blocks_sent == (-(-longer // 16)).sum()
    assert run.network.bytes > longer.sum() * 131_072
    for worker in workers:
        assert worker.core.scheduler.counters.recomputed_tokens == 0


def test_data_leave_while_the_prompt_is_computed():
    """Of a long prompt in many chunks only the last one is left to be sent at its end."""
    one = Trace(None, np.array([2000]), np.array([2]), None, None, None)
    link = LinkModel(bytes_per_second=5e6, latency=0.0)  # 0.16 s a chunk, 1.6 s the prompt

    def gap(chunk: int) -> float:
        """Seconds between the two tokens, less the step of the second."""
        server = replace(SERVER, max_num_batched_tokens=chunk)
        shape = ClusterShape(server, prefill=1, decode=1, token_bytes=4000, link=link)
        run = serve_cluster(one, shape, LinearCost(0.2, 1e-9))
        assert run.moves.received == 1
        return run.requests[0].tpot - 0.2

    assert 1.6 < gap(2000) < 1.7
    assert 0.16 < gap(200) < 0.4


def test_a_full_decode_worker_makes_requests_wait_and_nobody_fails(workers):
    """Its pool holds three of them; the others wait at the router or parked, and come in turn."""
    trace = Trace(None, np.full(12, 200), np.full(12, 40), None, None, None)
    tight = replace(SERVER, num_blocks=48, max_model_len=300)
    run = serve_cluster(trace, ClusterShape(tight, prefill=2, decode=1), COST)
    all_served(run, trace)
    nothing_leaks(workers)
    assert run.moves.received == 12


def test_blocks_that_are_there_by_name_are_not_sent(workers):
    ids = tuple(np.append(np.arange(10), 100 + i) for i in range(8))
    trace = Trace(np.arange(8) * 3.0, np.full(8, 170), np.full(8, 10), None, 16, ids)
    run = serve_cluster(trace, ClusterShape(SERVER, prefill=1, decode=1), COST)
    all_served(run, trace)
    nothing_leaks(workers)
    assert run.moves.tokens_there == 7 * 160
    assert run.moves.blocks_sent == 11 + 7
    assert run.cached_tokens >= 7 * 160


def test_requests_that_end_with_their_first_token_leave_nothing_behind(workers):
    outputs = np.array([1, 4] * 6)
    trace = Trace(np.arange(12) * 0.02, np.full(12, 100), outputs, None, None, None)
    run = serve_cluster(trace, ClusterShape(SERVER, prefill=1, decode=1), COST)
    all_served(run, trace)
    nothing_leaks(workers)
    assert (run.moves.received, run.moves.failed) == (6, 0)


def test_the_router_sheds_what_comes_too_late():
    rush = Trace(None, np.full(60, 200), np.full(60, 5), None, None, None)
    objective = Objective(0.5, 0.1)
    shape = ClusterShape(SERVER, 2)
    patient = serve_cluster(rush, shape, COST)
    shed = serve_cluster(rush, shape, COST, shed=objective)
    assert shed.ended("shed") + shed.ended("length") == 60
    assert 0 < shed.ended("shed") < 60
    assert patient.ended("shed") == 0
    assert max(r.ttft for r in shed.requests if r.first_token is not None) < 0.8
    assert max(r.ttft for r in patient.requests) > 0.8


def test_a_flood_does_not_hold_up_the_other_tenant_at_a_full_cluster():
    """Both wait at the router for room to decode; under a fair policy they get it in turn."""
    tenants = ("flood",) * 40 + ("other",) * 4
    arrivals = np.append(np.zeros(40), np.full(4, 0.5))
    trace = Trace(arrivals, np.full(44, 200), np.full(44, 40), tenants, None, None)

    def latest(policy: str) -> float:
        """Seconds until the last of the other tenant's had its first token."""
        tight = replace(SERVER, num_blocks=48, max_model_len=300, policy=policy)
        run = serve_cluster(trace, ClusterShape(tight, prefill=1, decode=1), COST)
        all_served(run, trace)
        return max(r.ttft for r in run.requests if r.tenant == "other")

    assert latest("fair") < 0.5 * latest("fcfs")


@pytest.mark.parametrize("shape", [{"workers": 3}, {"prefill": 2, "decode": 2}])
def test_equal_inputs_give_equal_runs(shape):
    runs = [serve_cluster(TRACE, ClusterShape(SERVER, **shape), COST) for _ in range(2)]
    assert runs[0] == runs[1]


def test_what_cannot_be():
    for bad in ({}, {"prefill": 1}, {"decode": 1}):
        with pytest.raises(ConfigError, match="give"):
            ClusterShape(SERVER, **bad)
    for bad in ({"workers": -1}, {"workers": 10**9}, {"prefill": 1, "decode": -1}):
        with pytest.raises(ConfigError, match="must be an integer from 0 to"):
            ClusterShape(SERVER, **bad)
    with pytest.raises(ConfigError, match="token_bytes=0"):
        ClusterShape(SERVER, 1, token_bytes=0)
    with pytest.raises(ConfigError, match="prefix_caching"):
        ClusterShape(replace(SERVER, prefix_caching=False), 1)
    with pytest.raises(ConfigError, match="block_size=0"):
        serve_cluster(TRACE, ClusterShape(replace(SERVER, block_size=0), 2), COST)


TRACES = os.environ.get("PAGEDKV_TRACES")


@pytest.mark.skipif(TRACES is None, reason="no traces: set PAGEDKV_TRACES")
def test_the_direction_of_splitwise():
    """What the closed form says of these devices (1.2 and 1.5 requests/s each) is what happens."""
    folder = Path(str(TRACES))
    lengths = LengthTable.read(folder / "azure2023_conv.csv")
    trace = invent(250, 1.4 * 4, Poisson(), lengths, 1)
    cost = read_cost(folder / "perf_splitwise.csv", "llama2-70b", "a100-80gb", 8)
    server = Server(80_000, max_num_batched_tokens=512)
    objective = Objective(1.0, 0.06)
    split = ClusterShape(
        replace(server, max_num_batched_tokens=2048), prefill=2, decode=2, token_bytes=327_680
    )
    assert serve_cluster(trace, split, cost).attainment(objective) > 0.95
    assert serve_cluster(trace, ClusterShape(server, 4), cost).attainment(objective) < 0.9
