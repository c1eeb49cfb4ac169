"""The front end of a simulated cluster: where requests enter, and where their tokens are delivered.

It has the real router and the real fence. Its messages to workers take no time, nor do theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from pagedkv.cache.index import make_frames
from pagedkv.errors import PagedKVError
from pagedkv.scheduling.messages import Add, Delta
from pagedkv.scheduling.namespaces import namespace_bytes
from pagedkv.simulation.agenda import Agenda
from pagedkv.simulation.objective import Objective
from pagedkv.simulation.serve import RequestTimes
from pagedkv.simulation.worker import Worker
from pagedkv.tiers.names import Namer
from pagedkv.transfer.fence import Disowned, Fence, Raised, Verdict
from pagedkv.transfer.messages import MoveId, split_owned_id
from pagedkv.transfer.router import Router
from pagedkv.transfer.routing import (
    Arrival,
    AskForPicture,
    Assign,
    Decision,
    Ended,
    RouterEvent,
    Shed,
    WorkerEvents,
    WorkerReport,
)


class Front:
    """Sends requests where the router says, and delivers what their owners report.

    times: of each request, filled in here. namer: of prompts' blocks; None: the router looks at
    loads alone. objective: what first tokens are due by, or None.
    """

    def __init__(
        self,
        agenda: Agenda,
        router: Router,
        times: list[RequestTimes],
        namer: Namer | None,
        objective: Objective | None,
    ) -> None:
        self.router, self.fence = router, Fence()
        self.workers: dict[str, Worker] = {}
        self.num_decisions = 0
        self.cached_tokens = 0
        self._agenda, self._times, self._namer, self._objective = agenda, times, namer, objective
        self._owned: dict[str, MoveId] = {}  # ids that have reported something
        self._adds: dict[str, Add] = {}  # of requests that wait for the router's word

    def worker(self, name: str) -> Worker:
        return self.workers[name]

    def arrive(self, add: Add) -> None:
        """A request has come. Its id is its place in `times`."""
        self._adds[add.request_id] = add
        self._ask(
            Arrival(
                add.request_id,
                len(add.prompt),
                add.params.max_tokens or 1,
                names=self._names(add),
                deadline=None if self._objective is None else add.arrival + self._objective.ttft,
            )
        )

    def tell_router(self, event: WorkerReport | WorkerEvents) -> None:
        self._ask(event)

    def deliver(self, worker: Worker, deltas: Sequence[Delta]) -> None:
        now, deliver = self._agenda.now, self.fence.deliver
        for delta in deltas:
            move = self._owned.get(delta.request_id)
            if move is None:
                move = self._owned[delta.request_id] = split_owned_id(delta.request_id)
            tokens, ended, verdicts = deliver(
                move, delta.sample, delta.token_ids, delta.finish_reason is not None
            )
            times = self._times[int(move.request)]
            if tokens:
                times.tokens += len(tokens)
                if times.first_token is None:
                    times.first_token = now
            if ended:
                times.end, times.reason = now, delta.finish_reason or ""
                self.cached_tokens += delta.num_cached_tokens
                verdicts += self.fence.close(move.request)
                self._ask(Ended(move.request))
                del self._owned[delta.request_id]
            if verdicts:
                self._carry_out(verdicts)

    def completed(
        self, worker: Worker, move: MoveId, counts: tuple[int, ...], ended: tuple[bool, ...]
    ) -> None:
        self._carry_out(self.fence.complete(move, counts, ended))

    def failed(self, worker: Worker, move: MoveId, reason: str) -> None:
        self._carry_out(self.fence.move_failed(move, worker.name))

    def _ask(self, event: RouterEvent) -> None:
        for decision in self.router.handle(event, self._agenda.now):
            self._obey(decision)

    def _obey(self, decision: Decision) -> None:
        match decision:
            case Assign():
                self.num_decisions += 1
                self._send(self._adds.pop(decision.request_id), decision)
            case Shed(request_id):
                self.num_decisions += 1
                del self._adds[request_id]
                times = self._times[int(request_id)]
                times.end, times.reason = self._agenda.now, "shed"
            case AskForPicture(worker):
                self.workers[worker].ask_for_picture()

    def _send(self, add: Add, decision: Assign) -> None:
        request = add.request_id
        owned = self.fence.open(request, decision.prefill)
        add = replace(add, request_id=owned.owned_id)
        worker = self.workers[decision.prefill]
        if decision.decode == decision.prefill:
            worker.add(add, request)
        else:
            move = self.fence.begin_move(request, decision.decode)
            worker.add(add, request, decision.decode, move)

    def _carry_out(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            match verdict:
                case Raised(request, old, new):
                    self._owned.pop(MoveId(request, old.epoch).owned_id, None)
                    self.workers[new.worker].own(MoveId(request, new.epoch))
                case Disowned(request, owner):
                    self.workers[owner.worker].disown(MoveId(request, owner.epoch))
                case _:  # workers do not die here
                    raise PagedKVError(f"request {verdict.request!r} has no owner any more")

    def _names(self, add: Add) -> Iterable[bytes]:
        if self._namer is None:
            return ()
        frames = make_frames(namespace_bytes(add.tenant, add.cache_salt), None)
        size = self.router.config.block_size
        full = len(add.prompt) // size * size
        tokens = np.array(add.prompt[:full], np.int32)
        return self._namer.walk(tokens, frames, 0, size)
