"""A Ray cluster of two nodes that is there already; one of them has another clock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from clustered import Clustered, Load, clustered
from mixed_requests import mixed

pytestmark = pytest.mark.deep

# The processes of the second node are told that they are on another host, whose monotonic clock
# shows so many seconds less or more, and whose wall clock goes behind.
_OFFSET = 40_000.0
_ELSEWHERE = f"""
import pathlib, time
monotonic, now, read_text = time.monotonic, time.time, pathlib.Path.read_text
time.monotonic = lambda: monotonic() + {_OFFSET}
time.time = lambda: now() - {_OFFSET}
def read(path, *given, **named):
    return "elsewhere" if path.name == "boot_id" else read_text(path, *given, **named)
pathlib.Path.read_text = read
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the cluster. Two CPUs a node: each gets one of two workers, with two threads."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "sitecustomize.py").write_text(_ELSEWHERE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # listen at 127.0.0.1 alone
        from ray.cluster_utils import Cluster

        store = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
        cluster = Cluster(
            initialize_head=True, head_node_args={**store, "include_dashboard": False}
        )
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        cluster.add_node(**store, env_vars={"PYTHONPATH": path})
        yield cluster.address
        cluster.shutdown()


@pytest.fixture(scope="module")
def apart(model: Path, address: str) -> Iterator[Clustered]:
    options = ("--prefill-workers", "1", "--decode-workers", "1", "--ray-address", address)
    with clustered(model, *options) as server:
        yield server


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_requests_move_between_nodes_whatever_their_clocks_show(
    apart: Clustered, model: Path
) -> None:
    load = Load(model, mixed(20, 20, 40))
    for request in load.requests:
        request["deadline_ms"] = 600_000.0
    nodes = {parent(worker["pid"]) for worker in apart.workers().values()}
    assert len(nodes) == 2  # a worker is a child of its node's
    assert all("2 threads" in apart.line(f"{name}: ") for name in apart.workers())
    assert load.run(apart) == load.expected
    apart.nothing_leaked()
    seen = apart.metrics()
    assert seen['pagedkv:requests_moved_total{outcome="done"}'] > 10
    assert seen['pagedkv:moved_tokens_total{source="sent"}'] > 200
    for part in ("queue_time", "prefill_time", "decode_time"):
        assert 0 <= seen[f"pagedkv:request_{part}_seconds_sum"] < _OFFSET / 4, part
    data: dict[str, Any] = httpx.get(f"{apart.url}/dashboard/data").json()
    decisions = data["picture"]["decisions"]
    assert {decision["words"].partition(":")[0] for decision in decisions} == set(apart.workers())
    assert all(abs(data["now"] - decision["now"]) < _OFFSET / 4 for decision in decisions)


@pytest.mark.parametrize("who", ["prefill-0", "decode-0"])
def test_a_worker_that_dies_is_started_again_and_moves_go_on(
    apart: Clustered, model: Path, who: str
) -> None:
    """The wall clock of where it starts may show less than that of where it was."""
    load, before = Load(model), apart.metrics()
    pid = apart.pid(who)
    assert load.run(apart, load.moment(who), lambda: apart.kill(pid)) == load.expected
    assert load.run(apart) == load.expected
    apart.nothing_leaked()
    moved = 'pagedkv:requests_moved_total{outcome="done"}'
    assert apart.metrics()[moved] > before[moved] + len(load.requests) // 2
