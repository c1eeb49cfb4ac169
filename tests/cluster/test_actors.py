"""Starting and ending Ray, and what a worker tells the router; with a Ray that is none."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from serving import toy_core

from pagedkv.cluster import actors as actors_module
from pagedkv.cluster.actors import Actors, Plan
from pagedkv.cluster.reporter import Reporter
from pagedkv.cluster.worker import Worker
from pagedkv.engine.wire import Ask
from pagedkv.errors import ConfigError
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import SamplingParams
from pagedkv.server.async_engine import AsyncEngine


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


def test_an_idle_worker_tells_all_of_its_cache_when_it_is_asked() -> None:
    """Its thread looks at nothing while there is nothing to do."""

    async def run() -> None:
        told: list[list[tuple[int, bytes]]] = []
        observe = SimpleNamespace(remote=lambda report, events: told.append(events))
        core = toy_core()
        core.send(Add("x", tuple(range(9)), SamplingParams(max_tokens=1), 0.0, 0))
        while core.has_unfinished():
            core.step(0.0)
        loop = asyncio.get_running_loop()
        reporter = Reporter("a", "host", core, SimpleNamespace(observe=observe), loop)
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
