"""Running the server: make the core, listen, end in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from transformers import PreTrainedTokenizerBase

from pagedkv import extras
from pagedkv.engine.arguments import make_llm
from pagedkv.engine.core import EngineCore
from pagedkv.engine.core_loop import core_facts
from pagedkv.engine.facts import Facts
from pagedkv.engine.llm import LLM
from pagedkv.engine.settle import settle
from pagedkv.errors import ConfigError, EngineDeadError, PagedKVError
from pagedkv.models.tokenizer import load_tokenizer
from pagedkv.server.app import create_app
from pagedkv.server.async_engine import AsyncEngine
from pagedkv.server.core_link import CoreLink, ProcessLink, ThreadLink
from pagedkv.server.http_protocol import PatientProtocol
from pagedkv.server.settings import ServerSettings, ServeSettings

if TYPE_CHECKING:
    from pagedkv.server.tracing import Tracing

# Exit status: 0 told to end, 1 the core has died. A signal that ends it at once adds its number.
_DIED = 1
_SIGNALLED = 128
# Seconds for answers that are complete to reach their clients when the server ends.
_LAST_WRITES = 5

_LOG = logging.getLogger("pagedkv.server")


def tokenizer_of(facts: Facts) -> PreTrainedTokenizerBase | None:
    """The tokenizer in the folder of the core's model."""
    return None if facts.folder is None else load_tokenizer(Path(facts.folder))


def run(settings: ServeSettings) -> int:
    """Serves until a signal comes or the core dies; the exit status.

    ConfigError, PagedKVError: nothing could be started, and nothing is left running.
    """
    level = settings.server.log_level.upper()
    logging.basicConfig(level=level, format="%(levelname)s:     %(message)s")
    return asyncio.run(_serve(settings))


async def _serve(settings: ServeSettings) -> int:
    given = settings.server
    asyncio.get_running_loop().set_exception_handler(Troubles())
    tracing = _tracing(given.otlp_traces_endpoint)
    with _bound(given) as listener:
        link = _link(settings)
        stop = _Stop(link)
        engine = AsyncEngine(link, tokenizer_of, seed=settings.engine.seed)
        if not await _started(engine, stop, settings.engine.model):
            return _SIGNALLED + stop.signal
        for line in engine.facts.report:
            _LOG.info("%s", line)
        app = create_app(engine, settings)
        if tracing is not None:
            tracing.follow(app, engine, settings.model_names()[0])
        settle()
        server = _Server(http_config(app, given))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        listener.listen()  # from the line on that says so; the server does it again
        _LOG.info("serving %s at %s", ", ".join(settings.model_names()), _address(listener))
        await _first(serving, stop.wait(), engine.died())
        if not serving.done():
            await _drain(engine, given.drain_timeout)
            server.should_exit = True
        status = _DIED if engine.dead is not None else 0
        try:
            await serving
        finally:
            await engine.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)
        return status


def _tracing(endpoint: str | None) -> Tracing | None:
    """MissingExtraError: there is nothing to trace with."""
    if endpoint is None:
        return None
    with extras():
        from pagedkv.server.tracing import Tracing
    return Tracing(endpoint)


def _link(settings: ServeSettings) -> CoreLink:
    arguments = settings.core_arguments()
    roles = settings.cluster.roles()
    if roles:
        with extras():
            from pagedkv.cluster.actors import Plan
            from pagedkv.cluster.link import ClusterLink
        cluster, slow_step = settings.cluster, settings.server.watchdog_after
        plan = Plan(
            roles,
            arguments,
            slow_step,
            cluster.ray_address,
            cluster.flip_roles_after,
            cluster.worker_threads,
        )
        return ClusterLink(plan)
    if settings.server.engine_process:
        given = settings.server
        events = given.kv_events_endpoint and (given.kv_events_endpoint, given.kv_events_topic)
        return ProcessLink(arguments, given.watchdog_after, kv_events=events or None)
    made: list[LLM] = []

    def make() -> EngineCore:
        made.append(make_llm(arguments))
        return made[0].engine.core

    return ThreadLink(
        make,
        facts=lambda core: core_facts(core, str(made[0].folder), made[0].report.lines()),
        finish=lambda: made[0].close(),
    )


def http_config(app: FastAPI, given: ServerSettings) -> uvicorn.Config:
    """How the application is served: bounds for clients, and no signals or logs of uvicorn's."""
    protocol = partial(
        PatientProtocol, reader_timeout=given.reader_timeout, head_timeout=given.reader_timeout
    )
    return uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]  # wants a class, and only calls it
        h11_max_incomplete_event_size=given.max_header_bytes,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=given.log_level == "debug",
        timeout_graceful_shutdown=_LAST_WRITES,
    )


class Troubles:
    """Reports what fails in the event loop, and once that no file descriptor is left.

    asyncio tells of that for each of 2048 connections at once that it cannot take, every second,
    and again of each of its further trials that comes when the server no longer listens.
    """

    _EXHAUSTED = "socket.accept() out of system resource"
    _TRIAL = "._start_serving("

    def __init__(self) -> None:
        self._told = False

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        message = str(context["message"])
        if message != self._EXHAUSTED:
            if self._TRIAL not in message:
                loop.default_exception_handler(context)
        elif not self._told:
            self._told = True
            _LOG.error(
                "no file descriptor is left for a new connection: clients wait until another one "
                "ends; let the process have more with `ulimit -n` (told once)"
            )


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None: they are `_Stop`'s."""
        yield


class _Stop:
    """SIGTERM and SIGINT: the first asks for the end, the second ends everything at once."""

    def __init__(self, link: CoreLink) -> None:
        self.signal = 0
        self._link, self._asked = link, asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._take, number)

    async def wait(self) -> None:
        """Until the first."""
        await self._asked.wait()

    def _take(self, number: int) -> None:
        if self.signal:
            self._link.kill()
            os._exit(_SIGNALLED + number)
        self.signal = number
        self._asked.set()


@contextmanager
def _bound(given: ServerSettings) -> Iterator[socket.socket]:
    """A socket that has its address and does not listen yet: known before a model is loaded."""
    address: str | tuple[str, int]
    if given.uds is not None:
        family, protocol, address = socket.AF_UNIX, 0, str(given.uds)
        where = f"uds={address!r}"
    else:
        family = socket.AF_INET6 if ":" in given.host else socket.AF_INET
        protocol = socket.IPPROTO_TCP  # else asyncio would let small packets wait for others
        address = (given.host, given.port)
        where = f"host={given.host!r} port={given.port}"
    with socket.socket(family, socket.SOCK_STREAM, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except (OSError, ValueError, TypeError) as error:  # the last two: it holds a null byte
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot listen at {where}: {why}: choose another") from None
        try:
            yield listener
        finally:
            if given.uds is not None:
                given.uds.unlink(missing_ok=True)


def _address(listener: socket.socket) -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _started(engine: AsyncEngine, stop: _Stop, model: str) -> bool:
    """Waits for the model. False: a signal came first."""
    begun = partial(_LOG.info, "loading %s", model)
    starting = asyncio.create_task(engine.start(begun))
    await _first(starting, stop.wait())
    if not starting.done():
        starting.cancel()
        engine.kill()
        await engine.close()
        return False
    try:
        await starting
    except PagedKVError as error:
        await engine.close()
        if isinstance(error, EngineDeadError):
            raise PagedKVError(error.reason) from None
        raise
    return True


async def _drain(engine: AsyncEngine, timeout: float) -> None:
    """Takes nothing more and lets what is here end, or gives it up after so many seconds."""
    if engine.dead is not None:
        _LOG.error("%s", engine.dead)
        return
    _LOG.info("shutting down: %g s for %d running request(s) to end", timeout, engine.num_live)
    engine.drain()
    try:
        await asyncio.wait_for(engine.ended(), timeout)
    except TimeoutError:
        _LOG.warning("%d requests did not end in time and are given up", engine.num_live)
        engine.give_up("the server is shutting down and the request did not end in time")


async def _first(*what: Any) -> None:
    """Until one of them is done. Those that are no tasks are cancelled then."""
    tasks = [asyncio.ensure_future(one) for one in what]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for given, task in zip(what, tasks, strict=True):
            if given is not task:
                task.cancel()
