"""The side that gets the request: RESERVED -> RECEIVING -> COMPLETE -> OWNED.

    RESERVED    a sequence is open on what was cached, the rest is reserved
    RECEIVING   payloads are being written, in any order
    COMPLETE    all K/V is there and verified; the front end is asked
    OWNED       the request is ours; its full blocks are leased until the scheduler has it

A move that ends before OWNED leaves the leading part that was verified cached under its names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from pagedkv.cache import BlockManager, Lease, OutOfBlocks, OutOfSequences, SeqId
from pagedkv.cache.types import Int32, Int64
from pagedkv.transfer.actions import (
    Abandoned,
    Action,
    Completed,
    Copy,
    Resumed,
    Send,
    Write,
)
from pagedkv.transfer.limits import TransferLimits
from pagedkv.transfer.messages import (
    Ack,
    Cancel,
    Commit,
    Data,
    Deny,
    FrameError,
    Grant,
    Hello,
    Hold,
    MoveId,
    Nack,
    Renew,
    Reserve,
    unpack_tokens,
)

Bool = npt.NDArray[np.bool_]
ToReceiver = Reserve | Data | Commit | Hold | Cancel


class ReceiverState(StrEnum):
    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMPLETE = "complete"
    OWNED = "owned"


@dataclass(slots=True, eq=False)
class _Move:
    """One move. Of the sequence's tokens:

    [0, base)            committed
    [base, base + room)  reserved at `slots`; `filled` says which are written and verified
    [0, len(tokens))     ids known
    """

    id: MoveId
    worker: str
    lease: int
    seq: SeqId
    tokens: Int32
    base: int
    slots: Int64  # [room]
    filled: Bool  # [room]
    heard: float
    spoke: float
    until: float = float("inf")  # COMPLETE, OWNED: when waiting ends
    state: ReceiverState = ReceiverState.RESERVED
    writing: Write | None = None
    commit: Commit | None = None
    hold: Lease | None = None

    @property
    def have(self) -> int:
        """Leading tokens whose K/V is there and verified."""
        missing = np.flatnonzero(~self.filled)
        return self.base + (int(missing[0]) if len(missing) else len(self.filled))

    @property
    def end(self) -> int:
        return self.base + len(self.slots)

    def renewal(self) -> Renew:
        complete = self.state is ReceiverState.COMPLETE
        return Renew(*self.id, lease=self.lease, have=self.have, complete=complete)


class Receiver:
    """All moves to this worker. Opens, reserves, commits and closes sequences of `manager`."""

    def __init__(self, manager: BlockManager, ours: Hello, limits: TransferLimits) -> None:
        self._manager, self._limits = manager, limits
        self._moves: dict[MoveId, _Move] = {}
        self._ended: dict[MoveId, tuple[float, str | None]] = {}  # when, why; None: owned
        self._next_lease = (ours.boot << 20) % 2**62 + 1  # no lease of an earlier start

    def __contains__(self, move: MoveId) -> bool:
        return move in self._moves

    @property
    def moves(self) -> list[MoveId]:
        """Moves that hold blocks here, oldest first."""
        return list(self._moves)

    def state(self, move: MoveId) -> ReceiverState:
        """KeyError: no such move holds blocks here."""
        return self._moves[move].state

    def handle(self, worker: str, message: ToReceiver, now: float) -> list[Action]:
        """A message of a sender. What does not fit the state of its move changes nothing.

        ValueError: the host has not carried out the Write of the message before.
        """
        it = self._moves.get(message.move)
        if it is not None and it.writing is not None:
            raise ValueError(
                f"move {it.id} has a Write that was not answered: call `written` first"
            )
        if isinstance(message, Cancel):
            return self._cancelled(it, worker, message, now)
        if it is None:
            return self._unknown(worker, message, now)
        if it.worker != worker:
            if isinstance(message, Reserve):
                reason = f"request {it.id.request!r} is being moved here by {it.worker!r}"
                return [Send(worker, Deny(*it.id, reason=reason))]
            return []
        if isinstance(message, (Data, Commit)) and message.lease != it.lease:
            return []
        it.heard = now
        if it.state is ReceiverState.OWNED:
            return [Send(worker, Ack(*it.id))]
        match message:
            case Reserve():
                return [Send(worker, Grant(*it.id, lease=it.lease, have=it.have))]
            case Data() if it.state is not ReceiverState.COMPLETE:
                return self._data(it, message, now)
            case Commit() if it.state is not ReceiverState.COMPLETE:
                return self._try_to_complete(it, message, now)
            case Data() | Commit():
                return self._say(it, it.renewal(), now)
        return []

    def written(self, move: MoveId, first_bad: int | None, now: float) -> list[Action]:
        """The host has carried out the Write of this move: all of it, or up to `first_bad`.

        ValueError: nothing is being written for it.
        """
        it = self._moves[move]
        if it.writing is None:
            raise ValueError(f"nothing is being written for move {move}")
        data, start, it.writing = it.writing.data, it.writing.start, None
        stop = data.stop if first_bad is None else first_bad
        it.filled[start - it.base : max(start, stop) - it.base] = True
        if first_bad is not None:
            answer = Nack(*move, lease=it.lease, number=data.number, first_bad=first_bad)
            return self._say(it, answer, now)
        return self._say(it, it.renewal(), now)

    def own(self, move: MoveId, now: float) -> list[Action]:
        """The front end has raised the epoch: the request is ours.

        Abandoned, where no complete copy is here any more.
        """
        it = self._moves.get(move)
        if it is not None and it.state is ReceiverState.OWNED:
            return []
        if it is None or it.commit is None or it.state is not ReceiverState.COMPLETE:
            return [Abandoned(move, "no complete copy of it is here")]
        full = self._manager.length(it.seq) // self._manager.block_size
        if full:  # the tail is left out: a leased one would have to be copied to go on in it
            it.hold = self._manager.lease(self._manager.block_table(it.seq)[:full].copy())
        self._manager.close(it.seq)
        it.state, it.until = ReceiverState.OWNED, now + self._limits.lease
        return [Send(it.worker, Ack(*move)), Resumed(move, it.commit)]

    def disown(self, move: MoveId, reason: str, now: float) -> list[Action]:
        """The copy is of no use: the front end has said so, or the host cannot go on with it."""
        it = self._moves.get(move)
        if it is None:
            if move not in self._ended:  # its Reserve may come yet
                self._remember(move, reason, now)
            return []
        if it.state is ReceiverState.OWNED:
            return self.admitted(move, now)
        return self._abandon(it, reason, now)[:-1]

    def admitted(self, move: MoveId, now: float) -> list[Action]:
        """The scheduler has the blocks of an owned request, or needs them no more."""
        it = self._moves.pop(move, None)
        if it is not None:
            self._remember(move, None, now)
            if it.hold is not None:
                it.hold.release()
        return []

    def tick(self, now: float) -> list[Action]:
        """Shows that we are alive; gives up on silent senders and front ends."""
        actions: list[Action] = []
        limits = self._limits
        for it in list(self._moves.values()):
            if it.state is ReceiverState.OWNED:
                if now >= it.until:
                    self.admitted(it.id, now)
                continue
            if it.state is ReceiverState.COMPLETE and now >= it.until:
                why = f"the front end has not answered for {limits.patience} s"
                actions += self._abandon(it, why, now)
            elif it.state is not ReceiverState.COMPLETE and now >= it.heard + limits.lease:
                why = f"nothing was heard of {it.worker!r} for {limits.lease} s"
                actions += self._abandon(it, why, now)
            elif now >= it.spoke + limits.heartbeat:
                actions += self._say(it, it.renewal(), now)
        while self._ended:
            oldest = next(iter(self._ended))
            if now < self._ended[oldest][0] + limits.memory:
                break
            del self._ended[oldest]
        return actions

    def peer_gone(self, worker: str, reason: str, now: float) -> list[Action]:
        """What the worker has not sent will not come. A complete copy may still be owned."""
        keep = (ReceiverState.COMPLETE, ReceiverState.OWNED)
        gone = [it for it in self._moves.values() if it.worker == worker and it.state not in keep]
        return [action for it in gone for action in self._abandon(it, reason, now)]

    # ---- steps of the verbs -------------------------------------------------------------------

    def _unknown(
        self, worker: str, message: Reserve | Data | Commit | Hold, now: float
    ) -> list[Action]:
        """A message of a move that holds nothing here."""
        move = message.move
        if move in self._ended:
            why = self._ended[move][1]
            answer = Ack(*move) if why is None else Cancel(*move, reason=why)
            return [Send(worker, answer)]
        if isinstance(message, Reserve):
            return self._reserve(worker, message, now)
        if isinstance(message, Hold) and message.lease is None:
            return []
        return [Send(worker, Cancel(*move, reason="no such move is known here"))]

    def _reserve(self, worker: str, message: Reserve, now: float) -> list[Action]:
        manager, move = self._manager, message.move
        deny = self._refusal(message)
        if deny is not None:
            return [Send(worker, deny)]
        tokens, naming = unpack_tokens(message.tokens), message.naming
        try:
            seq = manager.open(tokens, naming.namespace, naming.public, naming.extra)
        except OutOfSequences as error:
            return [Send(worker, Deny(*move, reason=str(error), retry_after=self._limits.retry))]
        base = manager.length(seq)
        room = len(tokens) + message.headroom - base
        try:
            reservation = manager.reserve([seq], [room])
        except OutOfBlocks as error:
            manager.close(seq)
            return [Send(worker, Deny(*move, reason=str(error), retry_after=self._limits.retry))]
        it = _Move(
            move,
            worker,
            self._next_lease,
            seq,
            tokens,
            base,
            reservation.slots,
            np.zeros(room, np.bool_),
            now,
            now,
        )
        self._next_lease += 1
        self._moves[move] = it
        copies: list[Action] = [Copy(reservation.copies)] if len(reservation.copies) else []
        return [*copies, Send(worker, Grant(*move, lease=it.lease, have=base))]

    def _refusal(self, message: Reserve) -> Deny | None:
        """Why there is no room, for now or for good; None: there may be."""
        manager, move, naming = self._manager, message.move, message.naming
        try:
            tokens = unpack_tokens(message.tokens)
            match = manager.match(tokens, naming.namespace, naming.public, naming.extra)
        except (ValueError, FrameError) as error:
            return Deny(*move, reason=str(error))
        size, total = manager.block_size, len(tokens) + max(0, message.headroom)
        blocks, most = -(-total // size), min(manager.num_blocks, manager.max_blocks_per_seq)
        if message.headroom < 0 or not len(tokens):
            reason = f"{len(tokens)} tokens and headroom={message.headroom} are no request"
            return Deny(*move, reason=reason)
        if blocks > most:
            reason = f"{total} tokens take {blocks} blocks, a sequence can have {most} here"
            return Deny(*move, reason=reason)
        demand = match.demand + blocks - -(-len(tokens) // size)
        busy = manager.num_held_blocks + manager.num_draining_blocks
        available = manager.num_free_blocks + manager.num_cached_blocks
        spare = self._limits.spare_blocks if busy else 0
        if demand + spare > available:
            reason = f"{demand} blocks needed and {spare} kept for others, {available} available"
            return Deny(*move, reason=reason, retry_after=self._limits.retry)
        return None

    def _data(self, it: _Move, data: Data, now: float) -> list[Action]:
        malformed = f"data of tokens [{data.start}, {data.stop}) is malformed"
        if not 0 <= data.start < data.stop or len(data.tokens) != 4 * (data.stop - data.start):
            return self._abandon(it, malformed, now)
        tokens = unpack_tokens(data.tokens)
        if (tokens < 0).any():
            return self._abandon(it, malformed, now)
        again = Nack(*it.id, lease=it.lease, number=data.number, first_bad=it.have)
        if data.start > len(it.tokens):  # of what lies between not even the tokens are known
            return self._say(it, again, now)
        known = it.tokens[data.start : data.stop]
        if not np.array_equal(known, tokens[: len(known)]):
            return self._abandon(it, f"tokens [{data.start}, {data.stop}) are not those known", now)
        copies: list[Action] = []
        if data.stop > it.end:
            if it.have < data.start:
                return self._say(it, again, now)
            try:
                copies = self._grow(it, data.stop)
            except (OutOfBlocks, ValueError) as error:
                return self._abandon(it, f"no room to grow: {error}", now)
        it.tokens = np.concatenate([it.tokens, tokens[len(known) :]])
        start = max(data.start, it.base)
        if start >= data.stop or it.filled[start - it.base : data.stop - it.base].all():
            return self._say(it, it.renewal(), now)
        it.state = ReceiverState.RECEIVING
        it.writing = Write(it.worker, data, start, it.slots[start - it.base : data.stop - it.base])
        return [*copies, it.writing]

    def _grow(self, it: _Move, stop: int) -> list[Action]:
        """Commits what is there and reserves up to `stop`. Errors as `reserve`: it has no more."""
        self._commit(it)
        reservation = self._manager.reserve([it.seq], [stop - it.base])
        it.slots, it.filled = reservation.slots, np.zeros(stop - it.base, np.bool_)
        return [Copy(reservation.copies)] if len(reservation.copies) else []

    def _commit(self, it: _Move) -> None:
        """Ends the reservation: the leading part that was verified is in place."""
        have = it.have
        self._manager.commit([it.seq], [it.tokens[it.base : have]])
        it.base, it.slots, it.filled = have, it.slots[:0], it.filled[:0]

    def _try_to_complete(self, it: _Move, commit: Commit, now: float) -> list[Action]:
        if it.have < commit.total:
            nack = Nack(*it.id, lease=it.lease, number=commit.number, first_bad=it.have)
            return self._say(it, nack, now)
        self._commit(it)  # which may be more than `total`: the sender was preempted meanwhile
        it.state, it.until = ReceiverState.COMPLETE, now + self._limits.patience
        it.commit = commit
        done = Completed(it.id, commit.counts, commit.ended)
        return [*self._say(it, it.renewal(), now), done]

    def _cancelled(
        self, it: _Move | None, worker: str, message: Cancel, now: float
    ) -> list[Action]:
        if it is None:
            if message.move not in self._ended:
                self._remember(message.move, message.reason, now)
            return []
        decided_elsewhere = (ReceiverState.COMPLETE, ReceiverState.OWNED)  # by the front end
        if it.worker != worker or it.state in decided_elsewhere:
            return []
        self._leave(it, message.reason, now)
        return [Abandoned(it.id, message.reason)]

    def _say(self, it: _Move, message: Renew | Nack, now: float) -> list[Action]:
        it.spoke = now
        return [Send(it.worker, message)]

    def _abandon(self, it: _Move, reason: str, now: float) -> list[Action]:
        self._leave(it, reason, now)
        return [Send(it.worker, Cancel(*it.id, reason=reason)), Abandoned(it.id, reason)]

    def _leave(self, it: _Move, reason: str, now: float) -> None:
        """Lets go of the blocks; the leading part that was verified stays cached."""
        del self._moves[it.id]
        self._remember(it.id, reason, now)
        if len(it.slots):
            self._commit(it)
        self._manager.close(it.seq)

    def _remember(self, move: MoveId, reason: str | None, now: float) -> None:
        """How a move has ended; the oldest first, for `tick`."""
        self._ended.pop(move, None)
        self._ended[move] = (now, reason)
