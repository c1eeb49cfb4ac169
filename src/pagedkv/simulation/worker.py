"""A worker of a simulated cluster: the real loop, whose steps take time on a common clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagedkv.engine.core import EngineCore
from pagedkv.scheduling.messages import Delta, Message
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.simulation.agenda import Agenda
from pagedkv.simulation.clock import VirtualClock
from pagedkv.simulation.executor import StepCost, TimedExecutor
from pagedkv.simulation.serve import Server


class Worker:
    """Runs one step after the other while there is something to do; costs nothing while idle.

    A step decides with what has been received when it starts. What it brings is handed to
    `deliver` (worker, deltas) when it ends; messages that come meanwhile wait for the next one.
    """

    def __init__(
        self,
        index: int,
        server: Server,
        cost: StepCost,
        agenda: Agenda,
        deliver: Callable[[Worker, Sequence[Delta]], None],
    ) -> None:
        self.index = index
        self._clock = VirtualClock()
        self.core = EngineCore(
            Scheduler(server.make_manager(), server.scheduling), TimedExecutor(self._clock, cost)
        )
        self.num_steps = 0
        self.busy_seconds = 0.0
        self._agenda, self._deliver = agenda, deliver
        self._computing = False

    def receive(self, message: Message) -> None:
        """Takes a message that has arrived now."""
        self.core.send(message)
        if not self._computing:
            self._step(self._agenda.now)

    def _step(self, now: float) -> None:
        self._clock.now = now
        deltas, stats = self.core.step(now)
        end = self._clock.now
        if stats is None and not deltas:
            return
        self._computing = True
        self.num_steps += stats is not None
        self.busy_seconds += end - now

        def finish(now: float) -> None:
            self._computing = False
            self._deliver(self, deltas)
            if not self._computing and self.core.has_unfinished():
                self._step(now)

        self._agenda.at(end, finish)
