"""The engine as the handlers of a server use it: requests are streams of an event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from pagedkv.engine.facts import Facts
from pagedkv.engine.front_end import FrontEnd
from pagedkv.engine.output import RequestOutput
from pagedkv.engine.requests import Prepared
from pagedkv.engine.status import CoreStatus
from pagedkv.engine.wire import Answer, Ask, Batch, Died, Ready
from pagedkv.errors import EngineDeadError, PagedKVError, ShutdownError
from pagedkv.scheduling.messages import Drain, Message
from pagedkv.server.core_link import CoreLink
from pagedkv.server.door import Door

_LOG = logging.getLogger("pagedkv.server")
_T = TypeVar("_T")

# The streams of the innermost `AsyncEngine.lifetime` around a task.
_LIFETIME: ContextVar[list[Stream]] = ContextVar("_LIFETIME")


class Stream:
    """What a request brings: an async iterator of cumulative outputs, the last one `finished`.

    Only the newest output is kept: a reader that is slow gets fewer and larger ones, and what it
    has not read takes no more memory than the output itself.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._newest: RequestOutput | None = None
        self._failure: PagedKVError | None = None
        self._news = asyncio.Event()
        self._over = False

    def put(self, output: RequestOutput) -> None:
        self._newest = output
        self._news.set()

    def fail(self, error: PagedKVError) -> None:
        """What has not been read yet is read first."""
        self._failure = error
        self._news.set()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        """EngineDeadError, ShutdownError: the request was given up before its end."""
        if self._over:
            raise StopAsyncIteration
        await self._news.wait()
        output, self._newest = self._newest, None
        if output is None:
            self._over = True
            if self._failure is None:
                raise StopAsyncIteration
            raise self._failure.with_traceback(None)  # all streams have the same
        if self._failure is None:
            self._news.clear()
        self._over = output.finished
        return output


class AsyncEngine:
    """A front and the link to its core. All of it belongs to one event loop.

    load_tokenizer: the model's, from the core's facts; None: it has none. seed: of requests that
    bring none. clock: seconds, the core's too; arrival times are on it.
    """

    def __init__(
        self,
        link: CoreLink,
        load_tokenizer: Callable[[Facts], PreTrainedTokenizerBase | None],
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.watchers: list[Callable[[Batch], None]] = []  # each is told of every Batch
        self.senders: list[Callable[[Message], None]] = []  # and these of every message to the core
        self.dead: EngineDeadError | None = None
        self.draining = False
        self.status: CoreStatus | None = None  # the newest; None before the core's first
        self._link = link
        self._load_tokenizer, self._seed = load_tokenizer, seed
        self._facts: Facts | None = None
        self._front: FrontEnd | None = None
        self._door: Door | None = None
        self._streams: dict[str, Stream] = {}
        self._ids = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._receiver: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()  # set while no request is live
        self._ended.set()
        self._died = asyncio.Event()
        self._num_sent = self._num_applied = 0  # messages to the core
        self._heard = 0.0  # when the core last brought something, or was given work

    @property
    def facts(self) -> Facts:
        """Of the core. RuntimeError before `start` has returned."""
        if self._facts is None:
            raise RuntimeError("the core is not ready")
        return self._facts

    @property
    def front(self) -> FrontEnd:
        """To read requests with. RuntimeError before `start` has returned."""
        if self._front is None:
            raise RuntimeError("the core is not ready")
        return self._front

    @property
    def door(self) -> Door:
        """To ask for room in the queue. RuntimeError before `start` has returned."""
        if self._door is None:
            raise RuntimeError("the core is not ready")
        return self._door

    @property
    def num_live(self) -> int:
        """Requests whose end has not come."""
        return len(self._streams)

    async def start(self, begun: Callable[[], None] = lambda: None) -> None:
        """Waits for the core to have its model. begun: is called when it begins to load it.

        EngineDeadError: it cannot. PagedKVError: there was nobody to load it.
        """
        await self._link.start()
        begun()
        match await self._link.receive():
            case Ready(facts):
                await self._prepare(facts)
            case Died(kind, reason):
                self._fail(EngineDeadError(reason, kind))
                raise EngineDeadError(reason, kind)
        self._receiver = asyncio.create_task(self._receive())

    def new_id(self, prefix: str) -> str:
        """An id that no other request has; the client's is what stands before the first "#"."""
        return f"{prefix}#{next(self._ids)}"

    def check_open(self) -> None:
        """EngineDeadError, ShutdownError: no request is taken any more."""
        if self.dead is not None:
            raise self.dead.with_traceback(None)  # that of an earlier one
        if self.draining:
            raise ShutdownError("the server is shutting down: send the request elsewhere")

    def submit(self, prepared: Prepared) -> Stream:
        """Starts a request. As `check_open`, and RequestError: nothing has been started."""
        self.check_open()
        self.door.check(prepared.add)
        self.front.submit(prepared)
        self.door.sent(prepared.add, self._num_sent)
        stream = Stream(prepared.add.request_id)
        self._streams[stream.request_id] = stream
        self._ended.clear()
        _LIFETIME.get([]).append(stream)
        return stream

    @contextmanager
    def lifetime(self) -> Iterator[None]:
        """What is submitted inside, by tasks that are started there too, is cancelled at its end.

        However that comes: so nothing runs on for a client that is gone, at whatever point its
        handler was stopped.
        """
        streams: list[Stream] = []
        token = _LIFETIME.set(streams)
        try:
            yield
        finally:
            _LIFETIME.reset(token)
            for stream in streams:
                self.cancel(stream)

    def cancel(self, stream: Stream) -> None:
        """Ends a request in any state, if it has not ended; nothing more comes of it."""
        if self._streams.pop(stream.request_id, None) is not None:
            self.front.discard([stream.request_id])
            self._note_ends()

    async def ask(self, kind: str, argument: str = "") -> Any:
        """What the core says between two steps. EngineDeadError; LookupError: it has no answer."""
        if self.dead is not None:
            raise self.dead.with_traceback(None)  # that of an earlier one
        number = next(self._ids)
        self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._link.send(Ask(number, kind, argument))
            answer: Answer = await self._asked[number]
        finally:
            del self._asked[number]
        if answer.error is not None:
            raise LookupError(answer.error)
        return answer.value

    def drain(self) -> None:
        """Accepts nothing more; what is here is finished."""
        self.draining = True
        self._send(Drain())

    def figures(self) -> CoreStatus | None:
        """The core's last status, with what was refused on the way to it; None: not yet."""
        return None if self.status is None else self.door.counted(self.status)

    async def ended(self) -> None:
        """Waits until no request is live."""
        await self._ended.wait()

    async def died(self) -> None:
        """Waits until the core has died: see `dead`."""
        await self._died.wait()

    def give_up(self, why: str) -> None:
        """Ends all requests; their streams fail with ShutdownError."""
        for stream in list(self._streams.values()):
            self.cancel(stream)
            stream.fail(ShutdownError(why))

    def silent_for(self) -> float:
        """Seconds since the core that has work brought something; 0 while it has none."""
        busy = self._streams or self._num_sent > self._num_applied
        return self.clock() - self._heard if busy and self.dead is None else 0.0

    async def close(self) -> None:
        """Ends what is live, and the core."""
        for stream in list(self._streams.values()):
            self.cancel(stream)
        await self._link.close()
        if self._receiver is not None:
            await self._receiver

    def kill(self) -> None:
        """Ends the core at once, where it is a process."""
        self._link.kill()

    async def _prepare(self, facts: Facts) -> None:
        tokenizer = await asyncio.to_thread(self._load_tokenizer, facts)
        self._front = FrontEnd(
            tokenizer, facts.validate, self._send, seed=self._seed, clock=self.clock
        )
        self._facts, self._door = facts, Door(facts)

    def _send(self, message: Message) -> None:
        _tell(self.senders, message)
        if self.silent_for() == 0:
            self._heard = self.clock()
        self._num_sent += 1
        self._link.send(message)

    async def _receive(self) -> None:
        while self.dead is None:
            match await self._link.receive():
                case Batch() as batch:
                    self._deliver(batch)
                case Answer() as answer:
                    asked = self._asked.get(answer.id)
                    if asked is not None and not asked.done():  # done: nobody waits any more
                        asked.set_result(answer)
                case Died(kind, reason):
                    self._fail(EngineDeadError(reason, kind))

    def _deliver(self, batch: Batch) -> None:
        self.status = batch.status or self.status
        self._num_applied, self._heard = batch.applied, self.clock()
        brought = (delta.request_id for delta in batch.deltas)
        self.door.update(batch.applied, batch.status, brought)
        for output in self.front.process(batch.deltas):
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
                if output.finished:
                    del self._streams[output.request_id]
        self._note_ends()
        _tell(self.watchers, batch)

    def _fail(self, error: EngineDeadError) -> None:
        self.dead = error
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        for question in self._asked.values():
            if not question.done():
                question.set_exception(error)
        self._note_ends()
        self._died.set()

    def _note_ends(self) -> None:
        if not self._streams:
            self._ended.set()


def _tell(watchers: Iterable[Callable[[_T], None]], news: _T) -> None:
    for watch in watchers:
        try:
            watch(news)
        except Exception:  # a figure must not cost anybody a request
            _LOG.exception("a watcher of the engine has failed")
