"""Workers that are drained, die, or change their role while a simulated cluster serves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import all_served, keep_workers, nothing_leaks

from pagedkv.errors import ConfigError
from pagedkv.simulation import cluster as module
from pagedkv.simulation.clock import VirtualClock
from pagedkv.simulation.cluster import ClusterShape, serve_cluster
from pagedkv.simulation.executor import LinearCost, TimedExecutor
from pagedkv.simulation.front import Front
from pagedkv.simulation.incidents import Incidents
from pagedkv.simulation.network import LinkModel
from pagedkv.simulation.serve import Server
from pagedkv.simulation.trace import Trace
from pagedkv.simulation.workload import make_trace
from pagedkv.transfer.routing import FlipConfig

SERVER = Server(num_blocks=120, max_num_seqs=8, max_num_batched_tokens=128, max_model_len=600)
COST = LinearCost(0.01, 1e-4)
TRACE = make_trace(40, rate=10.0, prompt_tokens=80, output_tokens=90, seed=5)
LINK = LinkModel(bytes_per_second=2e9)


@pytest.mark.parametrize("shape", [{"workers": 3}, {"prefill": 1, "decode": 2}])
def test_a_drained_worker_is_empty_soon_and_nothing_is_computed_again(shape, workers):
    name = "worker-1" if "workers" in shape else "decode-1"
    roomy = replace(SERVER, num_blocks=600, max_num_seqs=32)
    shape = ClusterShape(roomy, **shape, link=LINK)
    run = serve_cluster(TRACE, shape, COST, incidents=Incidents(drains=((name, 1.0),)))
    all_served(run, TRACE)
    nothing_leaks(workers)
    quiet = serve_cluster(TRACE, shape, COST)
    assert run.moves.received > quiet.moves.received
    assert run.resumed == 0
    drained = next(worker for worker in workers if worker.name == name)
    assert drained.service.draining
    # It has done what it had done by then, and hardly more: its requests are longer than that.
    use = next(use for use in run.workers if use.name == name)
    others = [other.steps for other in run.workers if other.role == use.role and other is not use]
    assert use.steps < min(others) / 2
    computed = sum(w.core.scheduler.counters.recomputed_tokens for w in workers)
    assert computed == 0


@pytest.mark.plants_faults  # what the dead worker had
def test_requests_of_a_worker_that_dies_go_on_where_their_clients_are(workers):
    shape = ClusterShape(SERVER, 3, link=LINK)
    run = serve_cluster(TRACE, shape, COST, incidents=Incidents(deaths=(("worker-0", 1.5),)))
    all_served(run, TRACE)
    nothing_leaks(workers)
    assert run.resumed > 0
    dead = run.workers[0]
    assert dead.steps * 0.01 < 1.5 + 0.05


def test_a_side_that_starves_gets_a_worker_of_the_other(workers):
    """Long prompts with one token or two: nearly all of the work is prefill."""
    trace = Trace(np.arange(120) * 0.1, np.full(120, 400), np.full(120, 2), None, None, None)
    shape = ClusterShape(replace(SERVER, num_blocks=400), prefill=1, decode=3, link=LINK)
    flip = FlipConfig(patience_s=0.5, rest_s=2.0, queue_s=0.3)
    stiff = serve_cluster(trace, shape, LinearCost(0.01, 1e-3))
    run = serve_cluster(trace, shape, LinearCost(0.01, 1e-3), incidents=Incidents(flip=flip))
    all_served(run, trace)
    nothing_leaks(workers)
    assert run.flips >= 1
    assert [worker.role for worker in run.workers].count("prefill") >= 2
    assert run.seconds < 0.7 * stiff.seconds


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Trace, ClusterShape, Incidents]:
    """A small cluster, what it is to do, and what happens to it."""
    n = draw(st.integers(4, 14))
    trace = make_trace(
        n,
        rate=draw(st.sampled_from([5.0, 20.0, 100.0])),
        prompt_tokens=draw(st.sampled_from([20, 120])),
        output_tokens=draw(st.sampled_from([3, 30])),
        seed=draw(st.integers(0, 10**6)),
    )
    trace = replace(  # so that they all can run
        trace,
        prompt_tokens=np.minimum(trace.prompt_tokens, 400),
        output_tokens=np.minimum(trace.output_tokens, 150),
    )
    split = draw(st.booleans())
    link = LinkModel(draw(st.sampled_from([2e7, 2e9])))
    server = replace(SERVER, num_blocks=draw(st.sampled_from([60, 120])))
    if split:
        shape = ClusterShape(server, prefill=2, decode=3, link=link)
    else:
        shape = ClusterShape(server, workers=3, link=link)
    leave = {"prefill-0", "decode-0", "worker-0"}
    names = [name for name, _ in shape.roles if name not in leave]
    moments = st.floats(0.0, 2.0)
    happens = st.lists(st.tuples(st.sampled_from(names), moments), max_size=3)
    flip = FlipConfig(patience_s=0.2, rest_s=0.5, queue_s=0.05, full_share=0.3)
    return (
        trace,
        shape,
        Incidents(
            drains=tuple(draw(happens)),
            deaths=tuple(draw(happens)),
            flip=flip if split and draw(st.booleans()) else None,
        ),
    )


@pytest.mark.plants_faults
@settings(max_examples=25, deadline=None)
@given(clusters())
def test_whatever_happens_each_request_ends_once_with_all_of_its_tokens(case):
    trace, shape, incidents = case
    delivered: list[list[int]] = [[] for _ in range(len(trace))]

    class Noting(Front):
        def _note(self, deltas) -> None:
            for delta in deltas:
                delivered[int(delta.request_id)] += delta.token_ids
            super()._note(deltas)

    with pytest.MonkeyPatch.context() as patch:
        workers = keep_workers(patch)
        patch.setattr(module, "Front", Noting)
        run = serve_cluster(trace, shape, COST, incidents=incidents)
    all_served(run, trace)
    nothing_leaks(workers)
    draw = TimedExecutor(VirtualClock(), COST).token
    lengths = zip(trace.prompt_tokens.tolist(), run.requests, strict=True)
    assert delivered == [
        [draw(i, prompt + place) for place in range(request.tokens)]
        for i, (prompt, request) in enumerate(lengths)
    ]
    assert serve_cluster(trace, shape, COST, incidents=incidents) == run


@pytest.mark.parametrize(
    ("incidents", "message"),
    [
        (Incidents(drains=(("worker-9", 1.0),)), "no worker 'worker-9'"),
        (Incidents(deaths=(("worker-0", -1.0),)), "at least 0 seconds"),
        (Incidents(drains=(("worker-0", 1.0),), deaths=(("worker-1", 1.0),)), "would be left"),
    ],
)
def test_incidents_that_cannot_be(incidents, message):
    with pytest.raises(ConfigError, match=message):
        serve_cluster(TRACE, ClusterShape(SERVER, 2), COST, incidents=incidents)
