"""The actors of a cluster: placed, watched and started again by Ray, followed in one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from pagedkv import __version__
from pagedkv.cluster.router_actor import RouterActor
from pagedkv.cluster.router_messages import Duty, Turn, Wish
from pagedkv.cluster.runtime import share_nodes, start_ray
from pagedkv.cluster.worker import Started, Worker
from pagedkv.engine.machine import num_threads
from pagedkv.engine.wire import Died, FromCore, ToCore, pack, unpack_from_core
from pagedkv.errors import ConfigError
from pagedkv.transfer.routing import Assign, Role, RouterConfig, RouterStats, SetRole, Shed

_LOG = logging.getLogger("pagedkv.cluster")
# Seconds between two trials to start a worker whose core does not come up: at first, and at most.
_SOONEST, _LATEST = 1.0, 60.0
# Arguments that name a file for one engine to write.
_FILES = ("decision_log", "replay_log")


@dataclass(frozen=True, slots=True)
class Plan:
    """Which workers there are to be.

    roles: "prefill", "decode" or "both" by name, at first. arguments: of
    `engine.arguments.make_llm`. slow_step: seconds after which a step is reported. address: of a
    Ray cluster; None: one of our own on this machine. flip_after: seconds that one role is short
    of workers before one of the other changes to it; None: roles stay. threads: of each worker;
    None: the cores of this machine, or of the cluster's nodes, are shared by their workers.
    """

    roles: Mapping[str, Role]
    arguments: Mapping[str, Any]
    slow_step: float = 60.0
    address: str | None = None
    flip_after: float | None = None
    threads: int | None = None


def arguments_of(name: str, plan: Plan) -> dict[str, Any]:
    """Of one worker: files of its own, and its part of the memory where all are on one machine."""
    given = dict(plan.arguments)
    for setting in _FILES:
        if given.get(setting) is not None:
            given[setting] = f"{given[setting]}.{name}"
    if plan.address is None:
        given["engines"] = len(plan.roles)
    return given


class Listener(Protocol):
    """Is told in the event loop."""

    def up(self, worker: str, started: Started) -> None:
        """Its process runs and loads the model."""
        ...

    def shows(self, worker: str, now: float) -> None:
        """What its clock shows, or did a moment ago."""
        ...

    def came(self, worker: str, frame: FromCore) -> None:
        """ConfigError: the worker is of no use, and is to be started again."""
        ...

    def lost(self, worker: str, kind: str, why: str) -> bool:
        """It is gone with all that it had. Whether it is to be started again."""
        ...

    def decided(self, decisions: Sequence[Assign | Shed | SetRole], stats: RouterStats) -> None:
        """stats: of the router since it began."""
        ...

    def routed(self, up: bool, why: str = "") -> None:
        """The router is there and knows nothing yet, or is gone."""
        ...

    def broken(self, error: BaseException) -> None:
        """Nobody follows an actor any more: a fault of the program."""
        ...


class Actors:
    """A worker for each of the plan, and a router. listener: is told what happens."""

    def __init__(self, plan: Plan, listener: Listener) -> None:
        self._plan, self._listener = plan, listener
        self._ray: Any = None
        self._starting: asyncio.Task[Any] | None = None
        self._workers: dict[str, Any] = {}
        self._router: Any = None
        self._boots: dict[str, str] = {}
        self._starts: Counter[str] = Counter()
        self._sends: Counter[str] = Counter()  # since the last start
        self._session = self._calls = 0  # with routers; of the router since its session began
        self._routed = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begins. MissingExtraError, ConfigError: there is no Ray."""
        roles, address = self._plan.roles, self._plan.address
        # In a thread: it takes seconds, and would take SIGTERM for itself in the main one. Whoever
        # gives up waiting for it has to end it all the same: see `close`.
        self._starting = asyncio.create_task(asyncio.to_thread(start_ray, address, len(roles)))
        self._ray = await asyncio.shield(self._starting)
        gpus = 1 if str(self._plan.arguments.get("device", "")).startswith("cuda") else 0
        if address is None:  # a Ray with a place for each
            threads, cpus = self._plan.threads or max(1, num_threads() // len(roles)), 1
        else:
            nodes = await asyncio.to_thread(self._ray.nodes)
            threads = cpus = share_nodes(nodes, len(roles), self._plan.threads, gpus)
        make = self._ray.remote(Worker).options(
            num_cpus=cpus, num_gpus=gpus, max_restarts=-1, scheduling_strategy="SPREAD"
        )
        self._workers = {name: make.remote(name, threads, address is None) for name in roles}
        make = self._ray.remote(RouterActor).options(num_cpus=0, max_restarts=-1)
        self._router = make.remote()
        for name in roles:
            self._begin(self._follow(name))

    def route(self, config: RouterConfig) -> None:
        """Begins to listen to the router."""
        self._begin(self._follow_router(config))

    def send(self, worker: str, messages: Sequence[ToCore]) -> None:
        """In order, without waiting. They are lost where the worker is."""
        boot = self._boots.get(worker)
        if boot is not None:
            frames = [pack(message) for message in messages]
            self._workers[worker].send.remote(boot, self._sends[worker], frames)
            self._sends[worker] += 1

    def wish(self, wishes: Sequence[Wish]) -> None:
        """Requests want workers. Nobody answers while the router is not there."""
        self._tell(self._router.arrive, list(wishes))

    def end(self, requests: Sequence[str]) -> None:
        """Requests are over."""
        self._tell(self._router.end, list(requests))

    def assign(self, duties: Mapping[str, Duty]) -> None:
        """What each worker is for."""
        self._tell(self._router.assign, dict(duties))

    def lose(self, worker: str) -> None:
        """The router is to forget what it knows of a worker."""
        self._tell(self._router.lose, worker)

    async def close(self) -> None:
        """Ends all of it; what is not yet complete at the workers is lost."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._starting is not None:
            await asyncio.wait([self._starting])
            if self._starting.exception() is None:
                await asyncio.to_thread(self._starting.result().shutdown)

    def kill(self) -> None:
        """Ends the workers at once."""
        for actor in self._workers.values():
            with suppress(self._ray.exceptions.RayError):  # Ray is being ended already
                self._ray.kill(actor)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._done)
        self._tasks.append(task)

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("an actor is not followed any more", exc_info=error)
            self._listener.broken(error)

    def _tell(self, call: Any, it: Any) -> None:
        """The router, in order. One that is not there will know nothing, and is told all then."""
        if self._routed:
            call.remote(Turn(self._session, self._calls), it)
            self._calls += 1

    async def _follow(self, name: str) -> None:
        """Starts a worker, hears what it says, and again when it is lost."""
        pause, last = _SOONEST, ""
        while True:
            heard = False
            try:
                started = await self._started(name, last)
                last = started.boot
                async for frame in self._frames(name, started):
                    if isinstance(frame, Died):
                        kind, why = frame.kind, frame.reason
                        break
                    self._listener.came(name, frame)
                    heard = True
            except ConfigError as error:
                kind, why = "ConfigError", str(error)
            except self._ray.exceptions.RayError as error:
                kind, why = type(error).__name__, self._why(error)
            self._boots.pop(name, None)
            if not self._listener.lost(name, kind, why):
                return
            if heard:
                pause = _SOONEST
            else:  # it does not even come up
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LATEST)

    async def _started(self, name: str, last: str) -> Started:
        """A process of the worker that is another one than `last`; Ray starts it."""
        actor = self._workers[name]
        peers = {other: it for other, it in self._workers.items() if other != name}
        begin = actor.start.options(max_task_retries=-1)
        while True:
            self._starts[name] += 1
            started: Started = await begin.remote(
                self._starts[name],
                arguments_of(name, self._plan),
                self._plan.slow_step,
                peers,
                self._router,
            )
            if started.boot != last:
                break
            # Its core has died, or it could not be reached for a while: nobody knows what it has.
            self._ray.kill(actor, no_restart=False)
        self._boots[name], self._sends[name] = started.boot, 0
        self._listener.up(name, started)
        return started

    async def _frames(self, name: str, started: Started) -> Any:
        if started.version != __version__:
            yield Died(
                "ConfigError",
                f"worker {name!r} has pagedkv {started.version}, this server {__version__}: "
                "install the same on all hosts",
            )
        while True:
            now, frames = await self._workers[name].receive.remote(started.boot)
            self._listener.shows(name, now)
            for data in frames:
                yield unpack_from_core(data)

    async def _follow_router(self, config: RouterConfig) -> None:
        begin = self._router.begin.options(max_task_retries=-1)
        while True:
            try:
                self._session, self._calls = self._session + 1, 0
                await begin.remote(self._session, config, self._workers)
                self._routed = True
                self._listener.routed(True)
                while True:
                    self._listener.decided(*await self._router.decide.remote())
            except self._ray.exceptions.RayError as error:
                self._routed = False
                why = self._why(error)
                _LOG.warning("the router is gone and is started again: %s", why)
                self._listener.routed(False, why)
                if isinstance(error, self._ray.exceptions.RayTaskError):  # it may fail again
                    await asyncio.sleep(_SOONEST)

    def _why(self, error: Exception) -> str:
        """In our words; what Ray says of it is many lines, for those who debug."""
        _LOG.debug("Ray says", exc_info=error)
        known = self._ray.exceptions
        match error:
            case known.ActorUnavailableError():
                return "it cannot be reached"
            case known.RayActorError():
                return "its process has ended"
            case known.RayTaskError():
                return f"{type(error.cause).__name__}: {error.cause}"
        return " ".join(str(error).split())[:300]
