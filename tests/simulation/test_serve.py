"""Traces through the real loop: conservation, times, and sharing as the trace says."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from pagedkv.errors import ConfigError, PagedKVError
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.simulation.executor import LinearCost
from pagedkv.simulation.serve import Server, serve
from pagedkv.simulation.trace import Trace
from pagedkv.simulation.workload import make_trace

COST = LinearCost(0.01, 0.001, 0.00001)


def test_every_request_gets_its_tokens() -> None:
    trace = make_trace(60, 20.0, 30, 20, seed=3)
    run = serve(trace, Server(40, 4, max_num_seqs=8, max_num_batched_tokens=32), COST)
    ended = [(r.tokens, r.reason) for r in run.requests]
    wanted = trace.output_tokens.tolist()
    fits = (trace.prompt_tokens + trace.output_tokens <= 160).tolist()
    assert [pair for pair, fit in zip(ended, fits, strict=True) if fit] == [
        (tokens, "length") for tokens, fit in zip(wanted, fits, strict=True) if fit
    ]
    assert run.preemptions > 0
    served = [r for r in run.requests if r.tokens]
    assert len(served) == sum(fits)
    assert all(r.ttft > 0 and (r.tokens == 1 or r.tpot > 0) for r in served)


def test_a_lone_request_takes_the_time_of_its_steps() -> None:
    trace = Trace(np.array([5.0]), np.array([10]), np.array([3]), None, None, None)
    run = serve(trace, Server(8, 4, max_num_batched_tokens=64), LinearCost(1.0, 0.1))
    (request,) = run.requests
    assert request.ttft == pytest.approx(1.0 + 10 * 0.1)
    assert request.tpot == pytest.approx(1.1)
    assert run.seconds == pytest.approx(2.0 + 2 * 1.1)
    assert run.throughput == pytest.approx(3 / run.seconds)
    # 10, 11 and 12 tokens in 3 blocks of 4.
    assert run.mean_waste == pytest.approx((2 / 12 + 1 / 12 + 0) / 3)


def test_equal_runs_are_equal() -> None:
    trace = make_trace(40, 30.0, 20, 10)
    server = Server(30, 4, max_num_seqs=6, max_num_batched_tokens=16)
    assert serve(trace, server, COST) == serve(trace, server, COST)


def test_prompts_share_what_their_block_ids_share() -> None:
    ids = (np.array([1, 2]), np.array([1, 2, 3]), np.array([1, 4]))
    trace = Trace(np.arange(3.0), np.array([17, 26, 20]), np.array([1, 1, 1]), None, 8, ids)
    run = serve(trace, Server(64, 8), COST)
    assert run.cached_tokens == 0 + 16 + 8
    off = serve(trace, Server(64, 8, prefix_caching=False), COST)
    assert off.cached_tokens == 0


def test_tenants_share_nothing() -> None:
    ids = (np.array([1, 2]), np.array([1, 2]))
    lengths = np.array([17, 17]), np.array([1, 1])
    trace = Trace(np.arange(2.0), *lengths, ("a", "b"), 8, ids)
    assert serve(trace, Server(64, 8), COST).cached_tokens == 0


def test_what_can_never_run_is_told() -> None:
    trace = Trace(None, np.array([100, 5]), np.array([1, 1]), None, None, None)
    run = serve(trace, Server(4, 4), COST)
    assert [r.reason for r in run.requests] == ["error", "length"]
    assert np.isnan(run.requests[0].ttft)


def test_settings_that_cannot_work_are_refused() -> None:
    trace = make_trace(1, 1.0, 5, 5)
    with pytest.raises(ConfigError, match="num_blocks=0"):
        serve(trace, Server(0), COST)
    with pytest.raises(ConfigError, match="max_num_seqs=0"):
        serve(trace, Server(4, max_num_seqs=0), COST)
    with pytest.raises(ConfigError, match="block_size=0"):
        serve(trace, Server(4, 0), COST)
    with pytest.raises(ConfigError, match="requests=0"):
        trace.first(0)


def test_prompts_that_can_never_run_take_no_memory() -> None:
    most = np.array([2**31 - 1])
    for size, ids in ((None, None), (10**9 - 1, (np.array([7, 8, 9]),))):
        run = serve(Trace(None, most, np.array([1]), None, size, ids), Server(4, 4), COST)
        assert run.requests[0].reason == "error"


ONE = Trace(np.array([2.0]), np.array([8]), np.array([4]), None, None, None)


def test_a_scheduler_that_comes_to_a_standstill_is_an_error(monkeypatch) -> None:
    """Nothing would change any more: the loop would never end."""
    monkeypatch.setattr(Scheduler, "plan", lambda self, now: None)
    with pytest.raises(PagedKVError, match="at 2 s 1 requests have not ended and no step"):
        serve(ONE, Server(16), COST)


def test_the_garbage_collector_is_left_as_it_was(monkeypatch) -> None:
    usual = gc.get_threshold()
    serve(ONE, Server(16), COST)
    assert gc.get_threshold() == usual
    monkeypatch.setattr(Scheduler, "plan", lambda self, now: None)
    with pytest.raises(PagedKVError):
        serve(ONE, Server(16), COST)
    assert gc.get_threshold() == usual
