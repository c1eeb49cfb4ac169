"""Workers that are alike: one answer whoever gives it, whoever dies meanwhile."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from clustered import BLOCKS, Clustered, Load, descendants

_SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(1, 10))]


@pytest.fixture(scope="module")
def load(model: Path) -> Load:
    return Load(model)


def test_they_give_the_tokens_of_one_engine(replicas: Clustered, load: Load) -> None:
    assert load.run(replicas) == load.expected
    replicas.at_rest()
    metrics = httpx.get(f"{replicas.url}/metrics").text
    for name in ("worker-0", "worker-1"):
        assert f'pagedkv:worker_state{{role="both",state="ready",worker="{name}"}} 1.0' in metrics
    data = httpx.get(f"{replicas.url}/dashboard/data").json()
    assert data["picture"]["pool"]["num_blocks"] == 2 * BLOCKS
    assert [(worker["name"], worker["role"]) for worker in data["workers"]] == [
        ("worker-0", "both"),
        ("worker-1", "both"),
    ]


@pytest.mark.parametrize("who", ["worker-0", "router"])
@pytest.mark.parametrize("seed", _SEEDS)
def test_a_death_is_not_seen(replicas: Clustered, load: Load, who: str, seed: int) -> None:
    restarts = sum(worker["restarts"] for worker in replicas.workers().values())
    after, pid = load.moment(f"{who} {seed}"), replicas.pid(who)
    assert load.run(replicas, after, lambda: replicas.kill(pid)) == load.expected
    if who == "router":  # those that come now wait for the next one
        assert load.run(replicas) == load.expected
    replicas.nothing_leaked()
    starts = sum(worker["restarts"] for worker in replicas.workers().values())
    assert starts == restarts + (who != "router")


def test_workers_are_as_urgent_as_their_server(replicas: Clustered) -> None:
    ours = os.getpriority(os.PRIO_PROCESS, replicas.process.pid)
    theirs = {
        w["pid"]: os.getpriority(os.PRIO_PROCESS, w["pid"]) for w in replicas.workers().values()
    }
    assert theirs == dict.fromkeys(theirs, ours)
    assert theirs


def test_no_figures_of_its_use_leave_the_machine(replicas: Clustered) -> None:
    for worker in replicas.workers().values():
        environment = Path(f"/proc/{worker['pid']}/environ").read_bytes().split(b"\0")
        assert b"RAY_USAGE_STATS_ENABLED=0" in environment


def test_everything_listens_at_loopback_only(replicas: Clustered) -> None:
    replicas.at_rest()  # all that is to run has started
    pids = {replicas.process.pid, *descendants(replicas.process.pid)}
    listening = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    ours = [
        line.split()[3]
        for line in listening.splitlines()
        if pids & {int(pid) for pid in re.findall(r"pid=(\d+)", line)}
    ]
    assert len(ours) > 3
    loopback = re.compile(r"(127\.0\.0\.1|\[::ffff:127\.0\.0\.1\]|\[::1\])(%lo)?:")
    assert all(loopback.match(address) for address in ours), ours


def test_a_worker_is_drained_without_a_client_noticing(replicas: Clustered, load: Load) -> None:
    def drain(*options: str) -> str:
        command = [sys.executable, "-c", "from pagedkv.cli.main import main; main()", "drain"]
        done = subprocess.run(
            [*command, *options, "--url", replicas.url], capture_output=True, text=True
        )
        return done.stdout + done.stderr

    answers: list[str] = []
    assert load.run(replicas, 60, lambda: answers.append(drain("worker-0"))) == load.expected
    assert answers[0].splitlines()[-1].startswith("worker-0 (both): draining, 0 requests")
    assert load.run(replicas) == load.expected
    assert replicas.workers()["worker-0"]["state"] == "draining"
    assert "is the last worker of its role" in drain("worker-1")
    assert "there is no worker 'nobody': there are worker-0, worker-1" in drain("nobody")
    assert "worker-0 (both): ready" in drain("worker-0", "--undo")
    replicas.at_rest()


def test_it_ends_as_a_server_does(model: Path) -> None:
    from clustered import clustered

    with clustered(model, "--workers", "1") as server:
        assert "127.0.0.1:" in server.url
        processes = descendants(server.process.pid)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        left = [pid for pid in processes if Path(f"/proc/{pid}/cmdline").exists()]
        assert not [pid for pid in left if b"ray" in Path(f"/proc/{pid}/cmdline").read_bytes()]
