"""An AsyncEngine over the toy model in a thread, and a real server on a free port."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from tiny_llm import EOS, VOCAB, byte_tokenizer
from transformers import PreTrainedTokenizerFast

from pagedkv.cache import BlockManager
from pagedkv.engine.core import EngineCore
from pagedkv.engine.grammar import model_grammars
from pagedkv.engine.toy import ToyExecutor
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.scheduling.step import Executor, Result, Step, Ticket
from pagedkv.scheduling.tiering import LowerTiers
from pagedkv.server.app import create_app
from pagedkv.server.async_engine import AsyncEngine
from pagedkv.server.core_link import ThreadLink
from pagedkv.server.keys import key_hash
from pagedkv.server.serve import http_config
from pagedkv.server.settings import ServerSettings, ServeSettings, TenantSettings

MODEL = "toy"


def settings(keys: Mapping[str, str] | None = None, **server: Any) -> ServeSettings:
    """Those of a server of the toy model; `server`: of its HTTP side. keys: tenants by key."""
    tenants = {
        tenant: TenantSettings(key_hashes=(key_hash(key),)) for key, tenant in (keys or {}).items()
    }
    return ServeSettings(
        server=ServerSettings(served_model_name=(MODEL,), **server), tenants=tenants
    )


class GatedExecutor:
    """Computes a step only when the test lets it: `allow(n)` lets n steps pass, or all for ever."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._allowed = threading.Semaphore(0)
        self._open = threading.Event()
        self.reached = threading.Semaphore(0)  # released once for each step that has come here
        self.steps: list[Step] = []

    def allow(self, steps: int | None = 1) -> None:
        if steps is None:
            self._open.set()
        self._allowed.release(steps or 1)

    def submit(self, step: Step) -> Ticket:
        self.steps.append(step)
        self.reached.release()
        if not self._open.is_set():
            assert self._allowed.acquire(timeout=60), "the test let no step pass"
        return self._inner.submit(step)

    def collect(self, ticket: Ticket) -> Result:
        return self._inner.collect(ticket)


def toy_core(
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 64,
    max_num_seqs: int = 8,
    executor: Executor | None = None,
    lower: LowerTiers | None = None,
    **settings: Any,
) -> EngineCore:
    manager = BlockManager(num_blocks, block_size, max_seqs=max_num_seqs)
    config = SchedulerConfig(max_num_seqs, 16, max_model_len, (EOS,), VOCAB, **settings)
    grammars = model_grammars(byte_tokenizer(), VOCAB, (EOS,))
    executor = executor or ToyExecutor(num_blocks, block_size, VOCAB, grammars=grammars)
    return EngineCore(Scheduler(manager, config, lower), executor)


@asynccontextmanager
async def running(
    make: Callable[[], EngineCore] = toy_core,
    tokenizer: Callable[[], PreTrainedTokenizerFast] = byte_tokenizer,
) -> AsyncIterator[AsyncEngine]:
    """An engine that has been started; closed at the end, and nothing may be held then."""
    cores: list[EngineCore] = []

    def remembered() -> EngineCore:
        cores.append(make())
        return cores[0]

    engine = AsyncEngine(ThreadLink(remembered), lambda facts: tokenizer())
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
        for core in cores:
            core.scheduler.manager.check()


@contextmanager
def http_server(
    make: Callable[[], EngineCore] = toy_core,
    make_app: Callable[[AsyncEngine], FastAPI] = lambda engine: create_app(engine, settings()),
    tokenizer: Callable[[], PreTrainedTokenizerFast] = byte_tokenizer,
    given: ServerSettings | None = None,
    send_buffer: int | None = None,
) -> Iterator[str]:
    """A server in a thread; its address, such as http://127.0.0.1:40001.

    given: bounds of connections. send_buffer: what the kernel keeps of a connection, in bytes.
    """
    # With the protocol given asyncio sends small packets at once, as it does on its own sockets.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    started = threading.Event()
    servers: list[uvicorn.Server] = []
    failures: list[BaseException] = []

    async def serve() -> None:
        async with running(make, tokenizer) as engine:
            config = http_config(make_app(engine), given or settings().server)
            servers.append(uvicorn.Server(config))
            listening = asyncio.create_task(servers[0].serve(sockets=[listener]))
            while not servers[0].started and not listening.done():
                await asyncio.sleep(0)
            started.set()
            await listening

    def work() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failures.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(60), "the server did not start"
    try:
        if not failures:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        if servers:
            servers[0].should_exit = True
        thread.join(60)
        listener.close()
    assert not thread.is_alive(), "the server did not end"
    assert not failures, failures
