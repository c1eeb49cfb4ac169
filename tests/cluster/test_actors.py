"""Starting and ending Ray, and what a worker tells the router; with a Ray that is none."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from moving import toy_worker

from pagedkv.cluster import actors as actors_module
from pagedkv.cluster.actors import Actors, Plan, arguments_of
from pagedkv.cluster.reporter import Reporter
from pagedkv.cluster.runtime import share_nodes
from pagedkv.cluster.worker import Worker
from pagedkv.engine.wire import Ask
from pagedkv.errors import ConfigError
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import SamplingParams
from pagedkv.server.async_engine import AsyncEngine
from pagedkv.transfer.routing import Role


def test_a_signal_while_ray_starts_leaves_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    ray = SimpleNamespace(shutdown=lambda: ended.append(True))

    async def run() -> None:
        begun, go_on = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def start_ray(address: str | None, num_workers: int) -> Any:
            loop.call_soon_threadsafe(begun.set)
            go_on.wait()
            return ray

        monkeypatch.setattr(actors_module, "start_ray", start_ray)
        actors = Actors(Plan({"a": "both"}, {}), SimpleNamespace())
        starting = asyncio.create_task(actors.start())
        await begun.wait()
        starting.cancel()
        closing = asyncio.create_task(actors.close())
        go_on.set()
        await closing

    asyncio.run(run())
    assert ended == [True]


def test_workers_write_files_of_their_own_and_divide_the_memory_of_one_machine() -> None:
    roles: dict[str, Role] = {"worker-0": "both", "worker-1": "both"}
    plan = Plan(roles, {"decision_log": "d.jsonl", "replay_log": None, "seed": 3})
    assert arguments_of("worker-1", plan) == {
        "decision_log": "d.jsonl.worker-1",
        "replay_log": None,
        "seed": 3,
        "engines": 2,
    }
    assert arguments_of("worker-1", replace(plan, address="head:6379", arguments={})) == {}


def test_without_ray_nothing_begins_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_ray(address: str | None, num_workers: int) -> Any:
        raise ConfigError("there is no cluster: ray start --head")

    async def run() -> None:
        from pagedkv.cluster.link import ClusterLink

        monkeypatch.setattr(actors_module, "start_ray", start_ray)
        engine = AsyncEngine(ClusterLink(Plan({"a": "both"}, {})), lambda facts: None)
        begun: list[bool] = []
        with pytest.raises(ConfigError, match="ray start --head"):
            await engine.start(lambda: begun.append(True))
        await engine.close()
        assert begun == []

    asyncio.run(run())


class Grants:
    """A Ray of two nodes that notes what is asked for: options and arguments of each actor."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = []

    def nodes(self) -> list[dict[str, Any]]:
        cpus = {"Alive": True, "Resources": {"CPU": 8.0}}
        return [cpus, {"Alive": False, "Resources": {"CPU": 64.0}}, cpus, {**cpus, "Resources": {}}]

    def remote(self, kind: type) -> Any:
        def make(options: dict[str, Any], given: tuple[Any, ...]) -> None:
            self.asked.append((kind.__name__, options, given))

        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda *given: make(options, given))
        )

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize(
    ("workers", "wanted", "threads"), [(2, None, 8), (3, None, 4), (5, None, 2), (2, 3, 3)]
)
def test_a_worker_of_a_cluster_gets_the_cpus_that_it_computes_with(
    monkeypatch: pytest.MonkeyPatch, workers: int, wanted: int | None, threads: int
) -> None:
    async def run() -> None:
        ray = Grants()
        monkeypatch.setattr(actors_module, "start_ray", lambda address, num_workers: ray)
        monkeypatch.setattr(Actors, "_begin", lambda self, work: work.close())
        roles: dict[str, Role] = {f"w{i}": "both" for i in range(workers)}
        actors = Actors(Plan(roles, {}, address="h:1", threads=wanted), SimpleNamespace())
        await actors.start()
        asked = [(o["num_cpus"], given) for kind, o, given in ray.asked if kind == "Worker"]
        assert asked == [(threads, (name, threads, False)) for name in roles]
        await actors.close()

    asyncio.run(run())


def test_workers_for_which_there_is_no_room_are_refused() -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0, "GPU": 1.0}}] * 2
    assert share_nodes(nodes, 2, None, gpus=1) == 4
    with pytest.raises(ConfigError, match=r"3 workers of 1 CPUs and 1 GPU each: .* room for 2"):
        share_nodes(nodes, 3, None, gpus=1)
    with pytest.raises(ConfigError, match=r"room for 0; .* or a smaller worker_threads"):
        share_nodes(nodes, 1, 5, gpus=0)


def test_an_idle_worker_tells_all_of_its_cache_when_it_is_asked() -> None:
    """Its thread looks at nothing while there is nothing to do."""

    async def run() -> None:
        told: list[list[tuple[int, bytes]]] = []
        observe = SimpleNamespace(remote=lambda boot, report, events: told.append(events))
        host = toy_worker("a", {})
        core = host.core
        core.send(Add("x", tuple(range(9)), SamplingParams(max_tokens=1), 0.0, 0))
        while core.has_unfinished():
            core.step(0.0)
        loop = asyncio.get_running_loop()
        told_to = SimpleNamespace(observe=observe)
        reporter = Reporter("a", "boot", "host", core, host.moves, told_to, loop)
        reporter.look()
        worker = Worker("a", 0, True)
        asked: list[Ask] = []
        worker._core = SimpleNamespace(send=asked.append)
        worker._reporter = reporter
        await worker.tell_all()
        assert len(asked) == 1
        reporter.look()  # as the core's thread does after its answer
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        pictures = [events for events in told if events]
        assert len(pictures) == 2

    asyncio.run(run())
