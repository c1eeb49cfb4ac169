"""What tests of simulated clusters look at after a run."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.simulation import cluster
from pagedkv.simulation.cluster import ClusterRun
from pagedkv.simulation.trace import Trace
from pagedkv.simulation.worker import Worker


def keep_workers(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """Those of the clusters that are made from now on."""
    made: list[Worker] = []

    class Kept(Worker):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(cluster, "Worker", Kept)
    return made


def all_served(run: ClusterRun, trace: Trace) -> None:
    """Each with all of its tokens, and none of them twice."""
    assert {r.reason for r in run.requests} == {"length"}
    assert [r.tokens for r in run.requests] == np.maximum(trace.output_tokens, 1).tolist()


def nothing_leaks(workers: list[Worker]) -> None:
    """On those that live."""
    for worker in workers:
        if worker.alive:
            manager = worker.core.scheduler.manager
            manager.check()
            assert manager.num_held_blocks == manager.num_draining_blocks == 0
            assert manager.num_free_blocks + manager.num_cached_blocks == manager.num_blocks
            assert not worker.moves.busy
            assert not worker.core.has_unfinished()
