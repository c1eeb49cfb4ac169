"""The newest picture of the core, however many look at it."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any, NamedTuple

from pagedkv.server.async_engine import AsyncEngine

FRESH = 0.4  # seconds for which a picture is not asked for again
PATIENCE = 2.0  # seconds that a viewer waits for a core that is in a step
ARRAYS = ("states", "counts", "filled", "owners")


class Picture(NamedTuple):
    """values: of `take_picture`. tag: equal tags, equal arrays of the pool. taken: on the clock."""

    values: dict[str, Any]
    tag: str
    taken: float


class NoPicture(Exception):
    """The core is in its first step, or could not take a picture."""


class Pictures:
    """Asks the core for a picture when somebody wants one, and at most every FRESH seconds."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._newest: Picture | None = None
        self._asking: asyncio.Task[Picture] | None = None

    async def newest(self) -> Picture:
        """A fresh one; while a step keeps the core from answering, the last one there was.

        EngineDeadError: the core runs no more. NoPicture: there is none yet.
        """
        newest = self._newest
        if newest is not None and self._engine.clock() - newest.taken < FRESH:
            if self._engine.dead is not None:
                raise self._engine.dead
            return newest
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(self._forget)
        asking = self._asking
        await asyncio.wait({asking}, timeout=PATIENCE)
        if asking.done():
            return asking.result()
        if newest is None:
            raise NoPicture("the core is in a step, and no picture of it was taken before")
        return newest

    async def _ask(self) -> Picture:
        try:
            values = await self._engine.ask("pool")
        except LookupError as error:
            raise NoPicture(f"the core gave no picture: {error}") from error
        digest = hashlib.blake2b(digest_size=8)
        for name in ARRAYS:
            digest.update(values["pool"][name])
        self._newest = Picture(values, digest.hexdigest(), self._engine.clock())
        return self._newest

    def _forget(self, asked: asyncio.Task[Picture]) -> None:
        self._asking = None
        if not asked.cancelled():
            asked.exception()  # whoever still waits is told; if nobody does, it is no news
