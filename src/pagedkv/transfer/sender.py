"""The side that has the request: COMPUTING -> READY -> released, or reclaimed.

    COMPUTING   K/V is being computed here; full blocks are sent as they come
    READY       the request stands still (parked) until the receiver owns it
    released    on Ack: the host frees what it held
    reclaimed   on Cancel, silence, or too many failures: the request goes on here

Nothing is read or sent but by `progress`, to which the host gives a sequence that is open.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, get_args

from pagedkv.cache import BlockManager, SeqId
from pagedkv.cache.types import Int32
from pagedkv.transfer.actions import (
    Action,
    Free,
    Park,
    Reclaimed,
    Released,
    Send,
    SendData,
)
from pagedkv.transfer.limits import TransferLimits
from pagedkv.transfer.messages import (
    Ack,
    Cancel,
    Commit,
    Data,
    Deny,
    Grant,
    Hello,
    Hold,
    MoveId,
    Nack,
    Naming,
    Renew,
    Reserve,
    pack_tokens,
)
from pagedkv.transfer.payload import token_bytes

Mode = Literal["prefilled", "live"]
ToSender = Grant | Deny | Renew | Nack | Ack | Cancel


class SenderState(StrEnum):
    COMPUTING = "computing"
    READY = "ready"


@dataclass(slots=True, eq=False)
class _Move:
    """One move. Of the sequence's tokens:

    [0, acked)       at the receiver
    [acked, sent)    under way, in the messages of `flying`
    [sent, goal)     to be sent, as far as the window allows
    """

    id: MoveId
    to: str
    mode: Mode
    reserve: Reserve
    heard: float
    spoke: float
    retry_at: float
    give_up: float  # asking for room
    state: SenderState = SenderState.COMPUTING
    lease: int | None = None
    acked: int = 0
    sent: int = 0
    goal: int = 0
    number: int = 0  # of the last message
    flying: deque[tuple[int, int]] = field(default_factory=deque)  # (number, stop)
    answered: int = 0  # number of the last message that a Nack has answered
    failures: int = 0  # in a row
    remaining: int = 2**31  # tokens missing there when the last round of a live move began
    asked_to_park: bool = False
    final: Commit | None = None
    committing: bool = False  # the Commit is under way
    taken: bool = False  # and has arrived

    @property
    def waits(self) -> bool:
        """Whether an answer is due."""
        return bool(self.flying) or (self.committing and not self.taken)


class Sender:
    """All moves from this worker. `ours` says what it is. Reads `manager`, changes nothing in it.

    The host calls `progress` for every move after each step, and after messages and ticks.
    """

    def __init__(self, manager: BlockManager, ours: Hello, limits: TransferLimits) -> None:
        self._manager, self._limits = manager, limits
        self._piece = max(1, limits.piece_bytes // (token_bytes(ours) * manager.block_size))
        self._dtype = ours.dtype
        self._moves: dict[MoveId, _Move] = {}

    def __contains__(self, move: MoveId) -> bool:
        return move in self._moves

    @property
    def moves(self) -> list[MoveId]:
        """Moves under way, oldest first."""
        return list(self._moves)

    def state(self, move: MoveId) -> SenderState:
        """KeyError: no such move is under way."""
        return self._moves[move].state

    def start(
        self,
        move: MoveId,
        to: str,
        tokens: Int32,
        naming: Naming,
        mode: Mode,
        headroom: int,
        now: float,
    ) -> list[Action]:
        """Asks `to` for room. tokens: int32 [n], all that are known.

        headroom: tokens for which the receiver is to have room beyond these. A request moves once
        at a time: an earlier move of it is reclaimed. ValueError: the move is under way already, or
        no such mode.
        """
        if move in self._moves:
            raise ValueError(f"move {move} is under way already: use a new epoch")
        if mode not in get_args(Mode):
            raise ValueError(f"mode={mode!r}: use one of {', '.join(get_args(Mode))}")
        actions: list[Action] = []
        for other in [it for it in self._moves.values() if it.id.request == move.request]:
            if other.id.epoch > move.epoch:
                return [Reclaimed(move, "a newer move of the request is under way")]
            actions += self._fail(other, "a newer move of the request has begun")
        reserve = Reserve(*move, tokens=pack_tokens(tokens), naming=naming, headroom=headroom)
        limits = self._limits
        self._moves[move] = _Move(
            move, to, mode, reserve, now, now, now + limits.retry, now + limits.patience
        )
        return [*actions, Send(to, reserve)]

    def progress(self, move: MoveId, seq: SeqId, now: float) -> list[Action]:
        """K/V of all committed tokens of `seq` can be read now. Sends what the window allows.

        Before the request is parked only full blocks are sent. KeyError: no such move.
        """
        it = self._moves[move]
        if it.lease is None:
            return []
        size = self._manager.block_size
        length = self._manager.length(seq)
        if it.final is not None:
            it.goal = it.final.total
        elif it.mode == "prefilled":
            it.goal = max(it.goal, length // size * size)
        else:
            park = self._next_round(it, length)
            if park is not None:
                return [park]
        actions = self._send_data(it, seq, length, now)
        if it.final is not None and it.sent >= it.goal and not it.committing:
            it.number += 1
            it.committing = True
            it.retry_at = self._answer_due(it, now)
            commit = it.final
            actions.append(
                Send(
                    it.to,
                    Commit(
                        *move,
                        lease=it.lease,
                        number=it.number,
                        total=commit.total,
                        state=commit.state,
                        counts=commit.counts,
                        ended=commit.ended,
                    ),
                )
            )
        if actions:
            it.spoke = now
        return actions

    def parked(
        self,
        move: MoveId,
        seq: SeqId,
        state: bytes,
        counts: tuple[int, ...],
        ended: tuple[bool, ...],
        now: float,
    ) -> list[Action]:
        """The request stands still; all K/V of `seq` is to be moved, then ownership.

        The host keeps `seq` open until Released or Reclaimed. state: of `pack_state`;
        counts, ended: what of each sample was reported. ValueError: it is parked already.
        """
        it = self._moves[move]
        if it.final is not None:
            raise ValueError(f"move {move} is parked already")
        it.state = SenderState.READY
        total = self._manager.length(seq)
        it.final = Commit(
            *move, lease=0, number=0, total=total, state=state, counts=counts, ended=ended
        )
        return self.progress(move, seq, now)

    def cancel(self, move: MoveId, reason: str) -> list[Action]:
        """The request has ended here, or the host cannot go on: the receiver is told.

        Nothing else follows: the host knows. Unknown moves give nothing.
        """
        it = self._moves.pop(move, None)
        if it is None:
            return []
        return [Free(move, it.number), Send(it.to, Cancel(*move, reason=reason))]

    def handle(self, worker: str, message: ToSender, now: float) -> list[Action]:
        """A message of a receiver. What does not fit the state of its move changes nothing."""
        it = self._moves.get(message.move)
        if it is None or it.to != worker:
            if it is None and isinstance(message, (Grant, Renew, Nack)):
                # It holds room for nothing.
                return [Send(worker, Cancel(*message.move, reason="no such move is under way"))]
            return []
        if isinstance(message, (Renew, Nack)) and message.lease != it.lease:
            return []
        if not isinstance(message, Deny):
            it.heard = now
        match message:
            case Grant():
                self._granted(it, message)
            case Deny():
                return self._denied(it, message, now)
            case Renew():
                return self._renewed(it, message, now)
            case Nack():
                return self._go_back(it, message, now)
            case Ack():
                if it.committing:
                    del self._moves[it.id]
                    return [Free(it.id, it.number), Released(it.id)]
            case Cancel():
                del self._moves[it.id]
                return [Free(it.id, it.number), Reclaimed(it.id, message.reason)]
        return []

    def tick(self, now: float) -> list[Action]:
        """Sends again what was not answered, shows that we are alive, gives up on the silent."""
        actions: list[Action] = []
        limits = self._limits
        for it in list(self._moves.values()):
            if now >= it.heard + limits.lease and it.lease is not None:
                actions += self._fail(it, f"nothing was heard of {it.to!r} for {limits.lease} s")
            elif it.lease is None and now >= it.give_up:
                actions += self._fail(it, f"{it.to!r} gave no room within {limits.patience} s")
            elif it.lease is None and now >= it.retry_at:
                it.retry_at = now + limits.retry
                it.spoke = now
                actions.append(Send(it.to, it.reserve))
            elif it.waits and now >= it.retry_at:
                actions += self._again(it, it.acked, "no answer in time", now)
            if it.id in self._moves and now >= it.spoke + limits.heartbeat:
                it.spoke = now
                actions.append(Send(it.to, Hold(*it.id, lease=it.lease)))
        return actions

    def greeted(self, worker: str, now: float) -> list[Action]:
        """The worker is known now: what waits for room there is asked for at once."""
        waiting = [it for it in self._moves.values() if it.to == worker and it.lease is None]
        for it in waiting:
            it.retry_at = now + self._limits.retry
        return [Send(worker, it.reserve) for it in waiting]

    def peer_gone(self, worker: str, reason: str, granted_only: bool = False) -> list[Action]:
        """Moves to the worker have failed: all of them, or those that it had granted."""
        gone = [
            it
            for it in self._moves.values()
            if it.to == worker and not (granted_only and it.lease is None)
        ]
        for it in gone:
            del self._moves[it.id]
        return [a for it in gone for a in (Free(it.id, it.number), Reclaimed(it.id, reason))]

    # ---- steps of the verbs -------------------------------------------------------------------

    def _next_round(self, it: _Move, length: int) -> Park | None:
        """A live move: the goal of the next round, or that the request is to be parked."""
        size = self._manager.block_size
        if it.acked < it.goal or it.asked_to_park:
            return None
        remaining = length - it.acked
        if remaining < size or remaining >= it.remaining:  # a further round would not gain on it
            it.asked_to_park = True
            return Park(it.id, remaining)
        it.remaining = remaining
        it.goal = length // size * size
        return None

    def _send_data(self, it: _Move, seq: SeqId, length: int, now: float) -> list[Action]:
        """Pieces of [sent, goal), as far as the window and what is computed allow."""
        actions: list[Action] = []
        manager, size = self._manager, self._manager.block_size
        end = min(it.goal, length)
        table = manager.block_table(seq)
        while it.sent < end and len(it.flying) < self._limits.window:
            first = it.sent // size
            stop = min((first + self._piece) * size, end)
            blocks: Int32 = table[first : -(-stop // size)].copy()
            start = first * size
            tokens = manager.contents[blocks].reshape(-1)[: stop - start]
            it.number += 1
            it.flying.append((it.number, stop))
            it.sent = stop
            it.retry_at = self._answer_due(it, now)
            data = Data(
                *it.id,
                lease=it.lease or 0,
                number=it.number,
                start=start,
                stop=stop,
                tokens=pack_tokens(tokens),
                dtype=self._dtype,
            )
            actions.append(SendData(it.to, data, blocks))
        return actions

    def _granted(self, it: _Move, grant: Grant) -> None:
        if it.lease is None:
            it.lease = grant.lease
            it.acked = it.sent = it.goal = grant.have

    def _denied(self, it: _Move, deny: Deny, now: float) -> list[Action]:
        if it.lease is not None:
            return []
        if deny.retry_after is None:
            return self._fail(it, f"{it.to!r} refuses: {deny.reason}", tell=False)
        it.retry_at = now + deny.retry_after
        return []

    def _renewed(self, it: _Move, renew: Renew, now: float) -> list[Action]:
        it.taken |= renew.complete and it.committing
        if renew.have <= it.acked:
            return []
        it.acked = renew.have
        it.sent = max(it.sent, it.acked)
        it.failures = 0
        it.retry_at = self._answer_due(it, now)
        done = 0
        while it.flying and it.flying[0][1] <= it.acked:
            done = it.flying.popleft()[0]
        return [Free(it.id, done)] if done else []

    def _go_back(self, it: _Move, nack: Nack, now: float) -> list[Action]:
        if nack.number <= it.answered or nack.first_bad < it.acked:
            return []
        it.answered = nack.number
        return self._again(it, nack.first_bad, f"token {nack.first_bad} did not arrive whole", now)

    def _again(self, it: _Move, first: int, why: str, now: float) -> list[Action]:
        """All from token `first` on is sent again, by the next `progress`."""
        it.failures += 1
        if it.failures > self._limits.retries:
            return self._fail(it, f"{why}, {it.failures} times in a row")
        it.retry_at = self._answer_due(it, now)
        it.sent = min(it.sent, first)
        it.committing = it.taken = False
        it.flying.clear()  # not freed: they may arrive yet
        return []

    def _answer_due(self, it: _Move, now: float) -> float:
        """A receiver in a long step is not asked in vain too often: payloads are large."""
        return now + self._limits.retry * float(2**it.failures)

    def _fail(self, it: _Move, reason: str, tell: bool = True) -> list[Action]:
        del self._moves[it.id]
        told: list[Action] = [Send(it.to, Cancel(*it.id, reason=reason))] if tell else []
        return [*told, Free(it.id, it.number), Reclaimed(it.id, reason)]
