"""Frames come to a worker's core in the order in which they were sent, whatever overtakes them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagedkv.cluster import in_order
from pagedkv.cluster.objects import ObjectTransport, Parcel
from pagedkv.cluster.worker import Worker
from pagedkv.engine.wire import Died, FromPeer, pack, unpack_from_core
from pagedkv.scheduling.messages import Abort


def made() -> tuple[Worker, list[Any], str]:
    """A worker whose core only notes what it gets; the text of its start."""
    worker, got = Worker("w", 0, shared=False), list[Any]()
    worker._core = SimpleNamespace(send=got.append)
    worker._objects = ObjectTransport()
    return worker, got, worker._boot


def test_a_call_that_overtakes_waits() -> None:
    async def run() -> None:
        worker, got, boot = made()
        await worker.send(boot, 1, [pack(Abort("b")), pack(Abort("c"))])
        await worker.send("an earlier start", 0, [pack(Abort("x"))])
        assert not got
        await worker.send(boot, 0, [pack(Abort("a"))])
        assert [abort.request_id for abort in got] == ["a", "b", "c"]

    asyncio.run(run())


def test_a_call_that_never_comes_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_order, "LATE", 0.0)

    async def run() -> None:
        worker, got, boot = made()
        await worker.send(boot, 1, [pack(Abort("b"))])
        _, frames = await worker.receive(boot)
        (frame,) = map(unpack_from_core, frames)
        assert isinstance(frame, Died) and "call 0 did not come" in frame.reason and not got

    asyncio.run(run())


def test_a_frame_waits_for_its_payload_and_those_behind_it_for_the_frame() -> None:
    async def run() -> None:
        worker, got, _ = made()
        payload: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        calls = [
            asyncio.create_task(worker.hear("p", b"data", Parcel(b"name", payload))),
            asyncio.create_task(worker.hear("p", b"commit", None)),
            asyncio.create_task(worker.hear("q", b"of another", None)),
        ]
        await calls[2]
        assert got == [FromPeer("q", b"of another")]
        payload.set_result(np.arange(3, dtype=np.uint8))
        await asyncio.gather(*calls)
        assert got[1:] == [FromPeer("p", b"data"), FromPeer("p", b"commit")]
        assert worker._objects is not None
        read = worker._objects.get(b"name")
        assert read is not None and read.tolist() == [0, 1, 2]

    asyncio.run(run())
