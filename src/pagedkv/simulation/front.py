"""The front end of a simulated cluster: where requests enter, and where their tokens are delivered.

It has the real router, and the real dispatch with its fence. Its messages to workers take no time,
nor do theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pagedkv.cache.index import make_frames
from pagedkv.cluster.dispatch import Dispatch
from pagedkv.cluster.outcome import Outcome
from pagedkv.engine.wire import Complete, MoveFailed, PeerGone
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Add, Delta
from pagedkv.scheduling.namespaces import namespace_bytes
from pagedkv.simulation.agenda import Agenda
from pagedkv.simulation.objective import Objective
from pagedkv.simulation.serve import RequestTimes
from pagedkv.simulation.worker import Worker
from pagedkv.tiers.names import Namer
from pagedkv.transfer.router import Router
from pagedkv.transfer.routing import (
    Arrival,
    AskForPicture,
    Assign,
    Decision,
    Ended,
    RouterEvent,
    SetRole,
    Shed,
    WorkerGone,
)


class Front:
    """Sends requests where the router says, and delivers what their owners report.

    times: of each request, filled in here. scheduling: of the workers. namer: of prompts' blocks;
    None: the router looks at loads alone. objective: what first tokens are due by, or None.
    """

    def __init__(
        self,
        agenda: Agenda,
        router: Router,
        times: list[RequestTimes],
        scheduling: SchedulerConfig,
        namer: Namer | None,
        objective: Objective | None,
    ) -> None:
        self.router, self.dispatch = router, Dispatch(lambda: agenda.now)
        self.workers: dict[str, Worker] = {}
        self.num_decisions = 0
        self.last_delivery = 0.0
        self.cached_tokens = 0
        self._scheduling = scheduling
        self._agenda, self._times, self._namer, self._objective = agenda, times, namer, objective

    def worker(self, name: str) -> Worker:
        return self.workers[name]

    def arrive(self, add: Add) -> None:
        """A request has come. Its id is its place in `times`."""
        self.carry_out(self.dispatch.add(add))

    # What workers say

    def deliver(self, deltas: Sequence[Delta]) -> None:
        self.carry_out(self.dispatch.take(deltas))

    def heard(self, worker: str, news: Complete | MoveFailed) -> None:
        if isinstance(news, Complete):
            self.carry_out(self.dispatch.complete(news))
            return
        self.carry_out(self.dispatch.fail_move(worker, news))

    def tell_router(self, event: RouterEvent) -> None:
        for decision in self.router.handle(event, self._agenda.now):
            self._obey(decision)

    # What is done to workers

    def drain(self, name: str) -> None:
        """The worker gets nothing new from now on, and gives away what it has; see `look`."""
        if self.workers[name].alive:
            self.workers[name].drain(self._agenda.now)
            self.look()

    def lose(self, name: str) -> None:
        """The worker dies, and everybody is told."""
        self.workers[name].die()
        for other in self.workers.values():
            other.send(PeerGone(name))
        self.tell_router(WorkerGone(name))
        self.carry_out(self.dispatch.lose(name, "it died"))

    def look(self) -> None:
        """Moves away what should not be where it is; to be called a few times a second.

        That is what decodes at a worker that is drained, or was left at one that only prefills.
        """
        now = self._agenda.now
        for worker in [worker for worker in self.workers.values() if worker.alive]:
            if worker.service.gives_away:
                others = (
                    other.name
                    for other in self.workers.values()
                    if other.takes_decodes and other is not worker
                )
                self.carry_out(self.dispatch.empty(worker.name, others))
            if worker.service.end_turn(now, busy=bool(self.dispatch.of(worker.name))):
                worker.report(now)

    def carry_out(self, outcome: Outcome) -> None:
        """Does what has followed from something."""
        for worker, message in outcome.sends:
            self.workers[worker].send(message)
        if outcome.deltas:
            self._note(outcome.deltas)
        for request in outcome.closed:
            self.tell_router(Ended(request))
        for request in outcome.unplaced:
            self.tell_router(self._arrival(request))

    # Steps

    def _note(self, deltas: Sequence[Delta]) -> None:
        now = self.last_delivery = self._agenda.now
        for delta in deltas:
            times = self._times[int(delta.request_id)]
            if delta.token_ids:
                times.tokens += len(delta.token_ids)
                if times.first_token is None:
                    times.first_token = now
            if delta.finish_reason is not None:
                times.end, times.reason = now, delta.finish_reason
                self.cached_tokens += delta.num_cached_tokens

    def _obey(self, decision: Decision) -> None:
        match decision:
            case Assign(request, prefill, decode):
                self.num_decisions += 1
                self.carry_out(self.dispatch.place(request, prefill, decode))
            case Shed(request, reason):
                self.num_decisions += 1
                self.carry_out(self.dispatch.give_up(request, reason, "overload"))
                self._times[int(request)].reason = "shed"
            case AskForPicture(worker):
                self.workers[worker].ask_for_picture()
            case SetRole(worker, role):
                self.workers[worker].turn(role, self._agenda.now)

    def _arrival(self, request: str) -> Arrival:
        add, drawn = self.dispatch.wanted(request)
        due = None
        if self._objective is not None and not drawn:
            due = add.arrival + self._objective.ttft
        tenant, weight = self._scheduling.turn_of(add.tenant)
        return Arrival(
            request,
            len(add.prompt) + len(drawn),
            max(1, (add.params.max_tokens or 1) - len(drawn)),
            names=self._names(add, drawn),
            deadline=due,
            tenant=tenant,
            weight=weight,
        )

    def _names(self, add: Add, drawn: tuple[int, ...]) -> Iterable[bytes]:
        if self._namer is None:
            return ()
        frames = make_frames(namespace_bytes(add.tenant, add.cache_salt), None)
        tokens, size = (*add.prompt, *drawn), self.router.config.block_size
        full = len(tokens) // size * size
        return self._namer.walk(np.array(tokens[:full], np.int32), frames, 0, size)
