"""The core is asked for a picture as often as it changes hands, not as often as somebody looks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from pagedkv.errors import EngineDeadError
from pagedkv.server.dashboard import pictures
from pagedkv.server.dashboard.pictures import FRESH, NoPicture, Pictures

POOL = {"states": b"\0", "counts": b"\0\0", "filled": b"\0\0", "owners": b"\xff\xff"}


class Engine:
    """Answers when the test lets it."""

    def __init__(self) -> None:
        self.now, self.asked = 100.0, 0
        self.dead: EngineDeadError | None = None
        self.between_steps = asyncio.Event()
        self.between_steps.set()
        self.states = b"\0"

    def clock(self) -> float:
        return self.now

    async def ask(self, kind: str) -> Any:
        self.asked += 1
        await self.between_steps.wait()
        if self.dead is not None:
            raise self.dead
        if self.states == b"":
            raise LookupError("no pool")
        return {"pool": {**POOL, "states": self.states}}


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def test_many_viewers_ask_the_core_as_often_as_one() -> None:
    async def main() -> None:
        engine = Engine()
        seen = Pictures(engine)
        first = await asyncio.gather(*(seen.newest() for _ in range(50)))
        assert engine.asked == 1 and len(set(map(id, first))) == 1
        engine.now += FRESH * 0.9
        assert await seen.newest() is first[0] and engine.asked == 1
        engine.now += FRESH * 0.2
        second = await seen.newest()
        assert engine.asked == 2 and second.tag == first[0].tag
        engine.now, engine.states = engine.now + 1, b"\2"
        assert (await seen.newest()).tag != second.tag

    run(main())


def test_while_a_step_runs_the_last_picture_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "PATIENCE", 0.0)

    async def main() -> None:
        engine = Engine()
        seen = Pictures(engine)
        engine.between_steps.clear()
        with pytest.raises(NoPicture):
            await seen.newest()
        engine.between_steps.set()
        monkeypatch.setattr(pictures, "PATIENCE", 60.0)
        first = await seen.newest()  # the same question, which is answered now
        assert engine.asked == 1
        engine.now += 10
        engine.between_steps.clear()
        monkeypatch.setattr(pictures, "PATIENCE", 0.0)
        assert await seen.newest() is first
        assert await seen.newest() is first
        assert engine.asked == 2
        engine.between_steps.set()

    run(main())


def test_a_viewer_that_leaves_takes_nobody_else_along() -> None:
    async def main() -> None:
        engine = Engine()
        seen = Pictures(engine)
        engine.between_steps.clear()
        leaves, stays = (asyncio.create_task(seen.newest()) for _ in range(2))
        await asyncio.sleep(0)
        leaves.cancel()
        engine.between_steps.set()
        assert (await stays).values["pool"]["states"] == b"\0"

    run(main())


def test_a_core_that_has_died_or_cannot_say() -> None:
    async def main() -> None:
        engine = Engine()
        seen = Pictures(engine)
        engine.states = b""
        with pytest.raises(NoPicture, match="no pool"):
            await seen.newest()
        engine.states = b"\0"
        await seen.newest()
        engine.dead = EngineDeadError("gone", "Test")
        for passed in (0.0, 1.0):
            engine.now += passed
            with pytest.raises(EngineDeadError):
                await seen.newest()

    run(main())
