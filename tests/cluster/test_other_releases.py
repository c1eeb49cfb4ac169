"""A worker of another release is refused by name; what others do goes on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from moving import Worker, toy_worker

from pagedkv import __version__
from pagedkv.cluster import actors as actors_module
from pagedkv.cluster import link as link_module
from pagedkv.cluster.actors import Plan
from pagedkv.cluster.link import ClusterLink
from pagedkv.cluster.worker import Started, host_id
from pagedkv.engine.core_loop import core_facts
from pagedkv.engine.moves import Moves
from pagedkv.engine.toy import ToyExecutor
from pagedkv.engine.transports import LocalTransport
from pagedkv.engine.wire import Batch, Died, FromPeer, Ready, ToCore, ToPeer
from pagedkv.scheduling.messages import Abort, Add, Delta, Resume
from pagedkv.scheduling.params import SamplingParams
from pagedkv.transfer.messages import PROTOCOL
from pagedkv.transfer.routing import Assign, Role, RouterStats

SPLIT: dict[str, Role] = {"p": "prefill", "d": "decode"}


def test_a_worker_of_another_version_of_the_package_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a Ray that is none."""

    def method(answer: Any = None) -> Any:
        async def call(*given: Any) -> Any:
            return answer

        return SimpleNamespace(remote=call, options=lambda **given: SimpleNamespace(remote=call))

    def actor(kind: type, *given: Any) -> Any:
        version = "0.0.1" if given[:1] == ("d",) else __version__
        started = Started("boot", host_id(), 1, version, 0.0)
        return SimpleNamespace(
            start=method(started),
            receive=SimpleNamespace(remote=lambda boot: asyncio.Future()),
            lose=method(),
        )

    ray = SimpleNamespace(
        remote=lambda kind: SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda *given: actor(kind, *given))
        ),
        exceptions=SimpleNamespace(RayError=RuntimeError),
        shutdown=lambda: None,
    )

    async def run() -> None:
        monkeypatch.setattr(actors_module, "start_ray", lambda address, num_workers: ray)
        link = ClusterLink(Plan(SPLIT, {}))
        await link.start()
        died = await link.receive()
        assert isinstance(died, Died) and died.kind == "ConfigError"
        assert f"worker 'd' has pagedkv 0.0.1, this server {__version__}: install" in died.reason
        await link.close()

    asyncio.run(run())


class Hosted:
    """Actors that are cores in this thread: what is sent to one is there at once."""

    def __init__(self, plan: Plan, listener: Any) -> None:
        self.workers: dict[str, Worker] = {}

    def send(self, name: str, messages: list[ToCore]) -> None:
        worker = self.workers[name]
        for message in messages:
            if isinstance(message, (Add, Resume, Abort)):
                worker.core.send(message)
            else:
                worker.moves.handle(message, 0.0)

    def __getattr__(self, name: str) -> Any:
        return lambda *given: None  # nobody routes

    def turn(self, worker: Worker, link: ClusterLink) -> list[Delta]:
        """What a worker's loop does once."""
        deltas: list[Delta] = []
        if worker.core.has_unfinished():
            deltas, _ = worker.core.step(0.0)
            link.came(worker.name, Batch(tuple(deltas), None, 0))
        worker.moves.advance(0.0)
        for news in worker.moves.take_news():
            if isinstance(news, ToPeer):
                self.workers[news.worker].moves.handle(FromPeer(worker.name, news.frame), 0.0)
            else:
                link.came(worker.name, news)
        return deltas


@pytest.mark.parametrize("protocol", [PROTOCOL, PROTOCOL + 1])
def test_nothing_moves_to_a_worker_of_another_protocol_and_its_requests_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, protocol: int
) -> None:
    caplog.set_level("INFO", "pagedkv.cluster")
    monkeypatch.setattr(link_module, "Actors", Hosted)

    async def run() -> list[str]:
        link = ClusterLink(Plan(SPLIT, {}), lambda: 0.0)
        actors = link._actors
        assert isinstance(actors, Hosted)
        payloads: dict[Any, Any] = {}
        actors.workers = {name: toy_worker(name, payloads) for name in SPLIT}
        other = actors.workers["d"]
        executor, ours = other.core.executor, other.moves.endpoint.ours
        assert isinstance(executor, ToyExecutor)
        hello = msgspec.structs.replace(ours, protocol=protocol)
        other.moves = Moves(other.core, executor, LocalTransport(payloads, "d"), hello)
        for name, worker in actors.workers.items():
            link.up(name, Started("boot", host_id(), 1, __version__, 0.0))
            link.came(name, Ready(core_facts(worker.core)))
        link.send(Add("r", tuple(range(1, 30)), SamplingParams(max_tokens=12), 0.0, 0))
        link.decided([Assign("r", "p", "d", 0, 0, 0.0, 0.0, 0.0)], RouterStats())
        drew: list[str] = []
        for _ in range(100):
            await asyncio.sleep(0)  # what was put off goes out
            for name, worker in actors.workers.items():
                drew += [name for delta in actors.turn(worker, link) if delta.token_ids]
        assert "r" not in link._dispatch
        for worker in actors.workers.values():
            assert worker.manager.num_held_blocks == 0
        return drew

    drew = asyncio.run(run())
    refused = f"worker 'd' speaks transfer protocol {protocol}, this one {PROTOCOL}: run the same"
    if protocol == PROTOCOL:
        assert set(drew) == {"p", "d"} and refused not in caplog.text
    else:
        assert drew == ["p"] * 12
        assert f"request r was not moved: {refused}" in caplog.text
