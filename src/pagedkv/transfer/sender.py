"""The side that has the request: COMPUTING -> READY -> released, or reclaimed.

    COMPUTING   K/V is being computed here; full blocks are sent as they come
    READY       the request stands still (parked) until the receiver owns it
    released    on Ack: the host frees what it held
    reclaimed   on Cancel, silence, or too many failures: the request goes on here

Nothing is read or sent but by `progress`, to which the host gives a sequence that is open.
"""

from __future__ import annotations

from typing import get_args

import msgspec

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
from pagedkv.transfer.departure import Departure, Flying, Mode, SenderState, in_full
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
    Part,
    Renew,
    Reserve,
    pack_tokens,
)
from pagedkv.transfer.outgoing import Outgoing, Parted, known_tokens
from pagedkv.transfer.payload import token_bytes

ToSender = Grant | Deny | Renew | Nack | Ack | Cancel


class Sender:
    """All moves from this worker. `ours` says what it is. Reads `manager`, changes nothing in it.

    The host calls `progress` for every move after each step, and after messages and ticks.
    """

    def __init__(self, manager: BlockManager, ours: Hello, limits: TransferLimits) -> None:
        self._manager, self._limits = manager, limits
        self._piece = max(1, limits.piece_bytes // (token_bytes(ours) * manager.block_size))
        self._window = limits.window * self._piece  # blocks
        self._dtype = ours.dtype
        self._moves: dict[MoveId, Departure] = {}

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
        own: tuple[int, ...] = (),
    ) -> list[Action]:
        """Asks `to` for room. tokens: int32 [n], all that are known; of several samples, those that
        they have in common, and own: how many each has beyond these.

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
        reserve = Reserve(
            *move, tokens=pack_tokens(tokens), naming=naming, headroom=headroom, own=own
        )
        limits = self._limits
        self._moves[move] = Departure(
            move, to, mode, reserve, now, now, now + limits.retry, now + limits.patience
        )
        return [*actions, Send(to, reserve)]

    def progress(
        self, move: MoveId, seq: SeqId, now: float, parted: Parted | None = None
    ) -> list[Action]:
        """K/V of all committed tokens can be read now. Sends what the window allows.

        seq: of a lone sample, or of what all have in common; where they have `parted`, any that
        begins with that. Before the request is parked only full blocks are sent. KeyError: no such
        move.
        """
        it = self._moves[move]
        if it.lease is None:
            return []
        size = self._manager.block_size
        ends = it.ends(self._manager, seq, parted)
        if it.final is not None:
            it.aim(ends)
        elif it.mode == "prefilled":
            it.aim(in_full(ends, parted, size))
        elif it.next_round(ends, parted, size):
            return [Park(it.id, it.missing(ends))]
        actions = self._send_data(it, seq, ends, parted, now)
        if parted is not None and len(ends) > 1:
            actions += self._part(it, ends, parted, now)
        if it.final is not None:
            actions += self._commit(it, it.final, ends, now)
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
        parted: Parted | None = None,
    ) -> list[Action]:
        """The request stands still; all K/V is to be moved, then ownership.

        The host keeps its sequences open until Released or Reclaimed. state: of `pack_state`;
        counts, ended: what of each sample was reported. ValueError: it is parked already.
        """
        it = self._moves[move]
        if it.final is not None:
            raise ValueError(f"move {move} is parked already")
        it.state = SenderState.READY
        it.final = Commit(
            *move, lease=0, number=0, total=0, state=state, counts=counts, ended=ended
        )
        return self.progress(move, seq, now, parted)

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
                why = f"{it.to!r} gave no room within {limits.patience} s: {it.denied}"
                actions += self._fail(it, why)
            elif it.lease is None and now >= it.retry_at:
                it.retry_at = now + limits.retry
                it.spoke = now
                actions.append(Send(it.to, it.reserve))
            elif it.waits and now >= it.retry_at:
                actions += self._again(it, "no answer in time", now)
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

    def _send_data(
        self, it: Departure, seq: SeqId, ends: list[int], parted: Parted | None, now: float
    ) -> list[Action]:
        """Pieces of all lines, as far as the window and what is computed allow."""
        actions: list[Action] = []
        seqs = [seq] if parted is None else [seq, *parted.seqs]
        for i, (line, end, source) in enumerate(zip(it.lines, ends, seqs, strict=False)):
            if source is None:
                continue
            room = self._window - sum(flying.blocks for flying in it.flying)
            for piece in line.pieces(self._manager, source, end, self._piece, room):
                it.number += 1
                it.flying.append(Flying(it.number, i, piece.stop, len(piece.blocks)))
                it.retry_at = self._answer_due(it, now)
                data = Data(
                    *it.id,
                    lease=it.lease or 0,
                    number=it.number,
                    start=piece.start,
                    stop=piece.stop,
                    tokens=pack_tokens(piece.tokens),
                    dtype=self._dtype,
                    line=i,
                )
                actions.append(SendData(it.to, data, piece.blocks))
        return actions

    def _part(self, it: Departure, ends: list[int], parted: Parted, now: float) -> list[Action]:
        """Says that the samples have parted, behind all that they have in common."""
        if it.parting or it.common.sent < parted.common:
            return []
        it.number += 1
        it.parting = True
        it.retry_at = self._answer_due(it, now)
        own = tuple(
            None
            if seq is None
            else pack_tokens(known_tokens(self._manager, seq, parted.common, end))
            for seq, end in zip(parted.seqs, ends[1:], strict=True)
        )
        part = Part(*it.id, lease=it.lease or 0, number=it.number, common=parted.common, own=own)
        return [Send(it.to, part)]

    def _commit(self, it: Departure, final: Commit, ends: list[int], now: float) -> list[Action]:
        """The Commit, behind all of the K/V."""
        if it.committing or len(it.lines) < len(ends):
            return []
        if any(line.sent < end for line, end in zip(it.lines, ends, strict=False)):
            return []
        it.number += 1
        it.committing = True
        it.retry_at = self._answer_due(it, now)
        total, *own = ends
        commit = msgspec.structs.replace(
            final, lease=it.lease or 0, number=it.number, total=total, own=tuple(own)
        )
        return [Send(it.to, commit)]

    def _granted(self, it: Departure, grant: Grant) -> None:
        if it.lease is None:
            it.lease, it.parts = grant.lease, grant.parts
            it.common = Outgoing(grant.have, grant.have, grant.have)

    def _denied(self, it: Departure, deny: Deny, now: float) -> list[Action]:
        if it.lease is not None:
            return []
        if deny.retry_after is None:
            return self._fail(it, f"{it.to!r} refuses: {deny.reason}", tell=False)
        it.denied, it.retry_at = deny.reason, now + deny.retry_after
        return []

    def _renewed(self, it: Departure, renew: Renew, now: float) -> list[Action]:
        it.taken |= renew.complete and it.committing
        news = it.common.confirm(renew.have)
        if renew.own and not it.own and it.parting:
            it.own = [Outgoing(have, have, have) for have in renew.own]
            news = True
        for line, have in zip(it.own, renew.own, strict=False):
            news |= line.confirm(have)
        if not news:
            return []
        it.failures = 0
        it.retry_at = self._answer_due(it, now)
        done = 0
        while it.flying and it.flying[0].stop <= it.lines[it.flying[0].line].acked:
            done = it.flying.popleft().number
        return [Free(it.id, done)] if done else []

    def _go_back(self, it: Departure, nack: Nack, now: float) -> list[Action]:
        if nack.number <= it.answered or not 0 <= nack.line < len(it.lines):
            return []
        if nack.first_bad < it.lines[nack.line].acked:
            return []
        it.answered = nack.number
        why = f"token {nack.first_bad} did not arrive whole"
        return self._again(it, why, now, nack)

    def _again(self, it: Departure, why: str, now: float, nack: Nack | None = None) -> list[Action]:
        """What was not confirmed is sent again by the next `progress`; of one line what the Nack
        asks for.
        """
        it.failures += 1
        if it.failures > self._limits.retries:
            return self._fail(it, f"{why}, {it.failures} times in a row")
        it.retry_at = self._answer_due(it, now)
        for i, line in enumerate(it.lines):
            line.again(nack.first_bad if nack is not None and nack.line == i else line.acked)
        it.parting = len(it.own) > 0
        it.committing = it.taken = False
        it.flying.clear()  # not freed: they may arrive yet
        return []

    def _answer_due(self, it: Departure, now: float) -> float:
        """A receiver in a long step is not asked in vain too often: payloads are large."""
        return now + self._limits.retry * float(2**it.failures)

    def _fail(self, it: Departure, reason: str, tell: bool = True) -> list[Action]:
        del self._moves[it.id]
        told: list[Action] = [Send(it.to, Cancel(*it.id, reason=reason))] if tell else []
        return [*told, Free(it.id, it.number), Reclaimed(it.id, reason)]
