"""The requests that one call has started, as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from pagedkv.engine.output import RequestOutput
from pagedkv.engine.requests import Prepared
from pagedkv.server.async_engine import AsyncEngine, Stream


class Running:
    """Started together or not at all; `cancel` ends what has not ended, and may be called twice.

    Whoever makes one calls `cancel`, whatever happens.
    """

    def __init__(self, engine: AsyncEngine, prepared: Sequence[Prepared]) -> None:
        self._engine = engine
        self._streams: list[Stream] = []
        try:
            for request in prepared:
                self._streams.append(engine.submit(request))
        except BaseException:
            self.cancel()
            raise

    def __len__(self) -> int:
        return len(self._streams)

    def cancel(self) -> None:
        for stream in self._streams:
            self._engine.cancel(stream)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Which request, and the newest of it, until all have ended. EngineDeadError."""
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                yield 0, output
            return
        waiting = {self._next(i): i for i in range(len(self._streams))}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=waiting.__getitem__):
                    i, output = waiting.pop(task), task.result()
                    if not output.finished:
                        waiting[self._next(i)] = i
                    yield i, output
        finally:
            for task in waiting:
                task.cancel()

    def _next(self, i: int) -> asyncio.Task[RequestOutput]:
        return asyncio.create_task(self._streams[i].__anext__())
