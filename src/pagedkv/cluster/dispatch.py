"""Which worker has which request, and what follows when that changes. Sans-I/O.

The front end's requests have ids of their own; at a worker a request is called `id@epoch` (see
`transfer.messages.MoveId`), so that what a former owner still says is known for what it is. The
fence decides what is delivered; here messages are made of its verdicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from pagedkv.cluster.outcome import Outcome, nothing
from pagedkv.cluster.tries import Counts, Tries
from pagedkv.engine.wire import Complete, Disown, Move, MoveFailed, Own, ToCore
from pagedkv.scheduling.expiry import late
from pagedkv.scheduling.messages import Abort, Add, Delta, Drawn, RequestUsage, Resume
from pagedkv.transfer.departure import Mode
from pagedkv.transfer.fence import Disowned, Fence, Orphaned, Raised, Verdict
from pagedkv.transfer.messages import MoveId

# A request that has lost so many workers is given up: it may be what kills them.
MOST_LOSSES = 4

_REQUEST_ID = Delta._fields.index("request_id")
_ADMITTED_AT = Delta._fields.index("admitted_at")


@dataclass(slots=True)
class _Entry:
    """A request that has not ended. Times are on the front end's clock."""

    add: Add
    open: set[int]  # samples whose end was not delivered
    placed: bool = False
    aborts: list[Abort] = field(default_factory=list)  # asked for by the front end
    losses: int = 0
    num_scored: int = 0
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    reasons: dict[int, str] = field(default_factory=dict)  # by sample that has ended
    moves: dict[int, str] = field(default_factory=dict)  # under way: where to, by epoch
    tries: Tries = field(default_factory=Tries)

    def ended_by(self, abort: Abort) -> list[int]:
        """Samples that are open, and that it ends. Beams end together."""
        whole = abort.sample is None or self.add.beam is not None
        return sorted(self.open if whole else self.open & {abort.sample})


class Dispatch:
    """The requests of a front end and the workers that have them.

    clock: seconds, that of the requests' arrivals. counts: for reading only.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.tally = Counts()
        self._clock = clock
        self._fence = Fence()
        self._entries: dict[str, _Entry] = {}

    def __contains__(self, request: str) -> bool:
        return request in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def unplaced(self) -> list[str]:
        """Requests that no worker has, oldest first."""
        return [request for request, entry in self._entries.items() if not entry.placed]

    def is_unplaced(self, request: str) -> bool:
        """Whether it is open, and no worker has it."""
        return request in self._entries and not self._entries[request].placed

    def of(self, worker: str) -> list[str]:
        """Requests that the worker owns, oldest first."""
        return self._fence.requests_of(worker)

    def wanted(self, request: str) -> tuple[Add, tuple[int, ...]]:
        """A request, and the longest output that it has so far. KeyError: it is over."""
        entry = self._entries[request]
        drawn = self._fence.delivered(request) if self._known(request) else ()
        return entry.add, max(drawn, key=len, default=())

    # ---- what the front end asks for ----------------------------------------------------------

    def add(self, add: Add) -> Outcome:
        """A new request."""
        self._entries[add.request_id] = _Entry(add, set(range(add.params.n)))
        return Outcome([], [], [add.request_id], [])

    def abort(self, abort: Abort) -> Outcome:
        """Ends a request or a sample, wherever it is. Unknown ids are ignored."""
        entry = self._entries.get(abort.request_id)
        if entry is None:
            return nothing()
        entry.aborts.append(abort)
        owner = self._fence.owner(abort.request_id) if entry.placed else None
        if owner is not None:
            move = MoveId(abort.request_id, owner.epoch)
            message = replace(abort, request_id=move.owned_id)
            return Outcome([(owner.worker, message)], [], [], [])
        return self._end(abort.request_id, entry.ended_by(abort), abort.reason)

    def give_up(self, request: str, error: str, error_type: str) -> Outcome:
        """A request that nobody can serve ends with an error."""
        entry = self._entries.get(request)
        if entry is None:
            return nothing()
        return self._end(request, sorted(entry.open), "error", error, error_type)

    def expire(self) -> Outcome:
        """Requests that no worker has end when their deadline has passed. A worker does it else."""
        now, outcome = self._clock(), nothing()
        for request in self.unplaced:
            entry = self._entries[request]
            deadline = entry.add.deadline
            if deadline is not None and deadline < now:
                error = late(deadline - entry.add.arrival, "while no worker had it")
                ends = sorted(entry.open)
                outcome.extend(self._end(request, ends, "deadline", error, "deadline"))
        return outcome

    # ---- where requests go --------------------------------------------------------------------

    def place(self, request: str, worker: str, then: str | None = None) -> Outcome:
        """The worker gets a request that nobody has. Nothing happens if it is over, or somebody's.

        One that has brought tokens goes on behind those that were delivered. then: another worker,
        to which it moves when its prompt is computed, unless it ends with its first token.
        """
        entry = self._entries.get(request)
        if entry is None or entry.placed:
            return nothing()
        entry.placed = True
        message: ToCore
        if not self._known(request):
            move = self._fence.open(request, worker, entry.add.params.n, entry.reasons)
        else:
            move = self._fence.resume(request, worker)
            self.tally.resumed += 1
        if move.epoch or entry.reasons:
            message = self._resume(entry, move)
        else:
            message = replace(entry.add, request_id=move.owned_id)
        sends = [(worker, message), *self._aborts(entry, worker, move)]
        if then is not None and then != worker and entry.add.params.max_tokens != 1:
            sends.append(self._move(request, entry, worker, then, "prefilled"))
        return Outcome(sends, [], [], [])

    def move_away(self, request: str, to: str) -> Outcome:
        """A request that runs moves to worker `to`, without a pause that its client would see.

        Nothing happens if nobody has it, or it is moving already.
        """
        entry = self._entries.get(request)
        if entry is None or not entry.placed or entry.moves:
            return nothing()
        owner = self._fence.owner(request)
        if owner is None or owner.worker == to:
            return nothing()
        return Outcome([self._move(request, entry, owner.worker, to, "live")], [], [], [])

    def empty(self, worker: str, others: Iterable[str]) -> Outcome:
        """What has settled at a worker moves to others, each request to the one that has fewest.

        One whose move has failed waits for a while, and goes to another worker if there is one.
        """
        outcome, now = nothing(), self._clock()
        leaving = [it for it in self.settled(worker) if self._entries[it].tries.is_due(now)]
        load = {other: len(self.of(other)) for other in others} if leaving else {}
        for request in leaving if load else ():
            last = self._entries[request].tries.to
            to = min(load, key=lambda name: (name == last, load[name], name))
            load[to] += 1
            outcome.extend(self.move_away(request, to))
        return outcome

    def stuck(self, worker: str) -> str | None:
        """Why requests that the worker owns have not moved away, if that was tried in vain."""
        tries = [self._entries[request].tries for request in self._fence.requests_of(worker)]
        failed = [one for one in tries if one.failures]
        if not failed:
            return None
        last = max(failed, key=lambda one: one.at)
        return f"{len(failed)} of {len(tries)} could not move yet: {last.reason}"

    def settled(self, worker: str) -> list[str]:
        """Requests that the worker owns, have brought a token, and are on no move; oldest first."""
        return [
            request
            for request in self._fence.requests_of(worker)
            if not self._entries[request].moves
            and self._entries[request].first_token_at is not None
        ]

    # ---- what workers say ---------------------------------------------------------------------

    def take(self, deltas: Iterable[Delta]) -> Outcome:
        """What workers have brought, each delta under the id that the request has there."""
        now, outcome = self._clock(), nothing()
        fence, entries, delivered = self._fence, self._entries, outcome.deltas
        for delta in deltas:
            move = fence.speaking(delta.request_id)
            if move is None:  # a former owner
                continue
            ended = delta.finish_reason is not None
            new, over, verdicts = fence.deliver(move, delta.sample, delta.token_ids, ended)
            if len(new) != len(delta.token_ids) or over != ended:  # the sample has ended already
                continue
            noted = entries[move.request]
            self._note(noted, delta, now)
            fields = list(delta)  # twice as fast as `_replace`, for every token of every worker
            fields[_REQUEST_ID] = move.request
            fields[_ADMITTED_AT] = noted.admitted_at  # another host knows it by its age
            delivered.append(Delta._make(fields))
            if verdicts:
                self._follow(verdicts, outcome)
            entry = self._entries.get(move.request) if ended else None
            if entry is not None and not entry.open:
                self._close(move.request, outcome)
        return outcome

    def complete(self, complete: Complete) -> Outcome:
        """The receiver of a move has all of it."""
        outcome, move = nothing(), MoveId(complete.request_id, complete.epoch)
        self._follow(self._fence.complete(move, complete.counts, complete.ended), outcome)
        return outcome

    def fail_move(self, worker: str, failed: MoveFailed) -> Outcome:
        """`worker` says that a move has failed; its old owner goes on with the request.

        The move is under way until that owner has said so: a receiver knows less of why.
        """
        outcome, move = nothing(), MoveId(failed.request_id, failed.epoch)
        entry = self._entries.get(move.request)
        if entry is not None and move.epoch in entry.moves and worker in self._owners(move.request):
            if failed.ended:
                del entry.moves[move.epoch]
                self.tally.moves_ended += 1
            else:
                to = entry.moves.pop(move.epoch)
                entry.tries = entry.tries.failed(to, failed.reason, self._clock())
                self.tally.moves_failed += 1
        self._follow(self._fence.move_failed(move, worker), outcome, failed.reason)
        return outcome

    def lose(self, worker: str, why: str) -> Outcome:
        """The worker is gone with all that it had; its requests go elsewhere."""
        outcome = nothing()
        for entry in self._entries.values():
            for epoch in [epoch for epoch, to in entry.moves.items() if to == worker]:
                del entry.moves[epoch]  # no reason to wait: others may have room
                self.tally.moves_failed += 1
        self._follow(self._fence.worker_lost(worker), outcome, why)
        return outcome

    # ---- steps --------------------------------------------------------------------------------

    def _known(self, request: str) -> bool:
        """Whether a worker has ever had it."""
        try:
            self._fence.owner(request)
        except KeyError:
            return False
        return True

    def _note(self, entry: _Entry, delta: Delta, now: float) -> None:
        entry.num_scored += len(delta.prompt_logprobs)
        entry.admitted_at = entry.admitted_at or delta.admitted_at
        if delta.token_ids:
            entry.first_token_at = entry.first_token_at or now
            entry.last_token_at = now
        if delta.finish_reason is not None:
            entry.open.discard(delta.sample)
            entry.reasons[delta.sample] = delta.finish_reason

    def _follow(self, verdicts: Sequence[Verdict], outcome: Outcome, why: str = "") -> None:
        for verdict in verdicts:
            match verdict:
                case Raised(request, old, new):
                    entry = self._entries[request]
                    self.tally.moves_done += 1
                    self.tally.moves_failed += len(entry.moves.keys() - {new.epoch})
                    entry.moves.clear()
                    entry.tries = Tries()
                    outcome.sends.append((new.worker, Own(request, new.epoch)))
                    outcome.sends.append((old.worker, Disown(request, old.epoch)))
                    move = MoveId(request, new.epoch)
                    outcome.sends.extend(self._aborts(entry, new.worker, move))
                case Disowned(request, owner):  # its owner will say that the move has failed
                    outcome.sends.append((owner.worker, Disown(request, owner.epoch)))
                case Orphaned(request):
                    self._orphaned(request, outcome, why)

    def _move(
        self, request: str, entry: _Entry, owner: str, to: str, mode: Mode
    ) -> tuple[str, ToCore]:
        move = self._fence.begin_move(request, to)
        entry.moves[move.epoch] = to
        return owner, Move(request, move.epoch, to, mode)

    def _owners(self, request: str) -> list[str]:
        """Where it is; nobody, if it is to be resumed."""
        owner = self._fence.owner(request)
        return [] if owner is None else [owner.worker]

    def _orphaned(self, request: str, outcome: Outcome, why: str) -> None:
        entry = self._entries[request]
        entry.placed = False
        self.tally.moves_failed += len(entry.moves)
        entry.moves.clear()
        entry.tries = Tries()
        entry.losses += 1
        for abort in entry.aborts:  # nobody is left to report these ends
            outcome.extend(self._end(request, entry.ended_by(abort), abort.reason))
            if request not in self._entries:
                return
        if entry.losses >= MOST_LOSSES:
            error = f"{entry.losses} workers in a row have lost the request, the last: {why}"
            outcome.extend(self._end(request, sorted(entry.open), "error", error, "engine"))
        else:
            outcome.unplaced.append(request)

    def _resume(self, entry: _Entry, move: MoveId) -> Resume:
        outputs = tuple(
            Drawn(tokens, entry.reasons.get(sample))
            for sample, tokens in enumerate(self._fence.delivered(move.request))
        )
        return Resume(
            replace(entry.add, request_id=move.owned_id),
            outputs,
            admitted_at=entry.admitted_at,
            first_token_at=entry.first_token_at,
            last_token_at=entry.last_token_at,
            num_scored=entry.num_scored,
        )

    def _aborts(self, entry: _Entry, worker: str, move: MoveId) -> list[tuple[str, ToCore]]:
        """What the front end has ended and a new owner does not know of."""
        return [
            (worker, replace(abort, request_id=move.owned_id))
            for abort in entry.aborts
            if abort.sample is None or abort.sample in entry.open
        ]

    def _end(
        self,
        request: str,
        samples: Sequence[int],
        reason: str,
        error: str | None = None,
        error_type: str | None = None,
    ) -> Outcome:
        """Ends samples of a request that nobody has, or that is given up."""
        entry, outcome = self._entries[request], nothing()
        for sample in samples:
            entry.open.discard(sample)
            entry.reasons[sample] = reason
            if self._known(request) and self._fence.owner(request) is None:
                self._fence.end(request, sample)
            outcome.deltas.append(
                Delta(
                    request,
                    sample,
                    finish_reason=reason,
                    error=error,
                    admitted_at=entry.admitted_at,
                    error_type=error_type,
                )
            )
        if not entry.open:
            if outcome.deltas and self._known(request):  # what it took is known to nobody
                outcome.deltas[-1] = outcome.deltas[-1]._replace(usage=RequestUsage())
            self._close(request, outcome)
        return outcome

    def _close(self, request: str, outcome: Outcome) -> None:
        self.tally.moves_ended += len(self._entries.pop(request).moves)
        outcome.closed.append(request)
        self._follow(self._fence.close(request), outcome)
