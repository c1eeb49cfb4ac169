"""The side that gets the request: RESERVED -> RECEIVING -> COMPLETE -> OWNED.

    RESERVED    line 0 is open on what was cached, room for the rest of all lines is reserved
    RECEIVING   payloads are being written, in any order
    COMPLETE    all K/V is there and verified; the front end is asked
    OWNED       the request is ours; its full blocks are leased until the scheduler has it

A move that ends before OWNED leaves the leading part that was verified cached under its names.
"""

from __future__ import annotations

import numpy as np

from pagedkv.cache import BlockManager, OutOfBlocks, OutOfSequences
from pagedkv.transfer.actions import (
    Abandoned,
    Action,
    Completed,
    Copy,
    Resumed,
    Send,
    Write,
)
from pagedkv.transfer.arrival import Arrival, ReceiverState
from pagedkv.transfer.incoming import Incoming, open_on, reserve
from pagedkv.transfer.limits import TransferLimits
from pagedkv.transfer.messages import (
    Ack,
    Cancel,
    Commit,
    Data,
    Deny,
    FrameError,
    Hello,
    Hold,
    MoveId,
    Nack,
    Part,
    Renew,
    Reserve,
    unpack_tokens,
)
from pagedkv.transfer.room import refusal, rooms_of

ToReceiver = Reserve | Data | Part | Commit | Hold | Cancel


class Receiver:
    """All moves to this worker. Opens, reserves, commits and closes sequences of `manager`.

    rows: sequences that these may be at most.
    """

    def __init__(
        self, manager: BlockManager, ours: Hello, limits: TransferLimits, rows: int
    ) -> None:
        self._manager, self._limits, self._rows = manager, limits, rows
        self._moves: dict[MoveId, Arrival] = {}
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

    def cached(self, move: MoveId) -> int:
        """Tokens of a move whose K/V were here before it, as far as is known; 0: no such move."""
        return self._moves[move].cached if move in self._moves else 0

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
        if isinstance(message, (Data, Part, Commit)) and message.lease != it.lease:
            return []
        it.heard = now
        if it.state is ReceiverState.OWNED:
            return [Send(worker, Ack(*it.id))]
        match message:
            case Reserve():
                return [Send(worker, it.grant())]
            case Data() if it.state is not ReceiverState.COMPLETE:
                return self._data(it, message, now)
            case Part() if it.state is not ReceiverState.COMPLETE:
                return self._part(it, message, now)
            case Commit() if it.state is not ReceiverState.COMPLETE:
                return self._try_to_complete(it, message, now)
            case Data() | Part() | Commit():
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
        line = it.line(data.line)
        if line is not None:
            line.fill(start, data.stop if first_bad is None else first_bad)
        if first_bad is not None:
            return self._again(it, data.number, data.line, first_bad, now)
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
        # Tails are left out: leased ones would have to be copied to go on in them.
        full = np.unique(np.concatenate([line.full_blocks for line in it.lines]))
        if len(full):
            it.hold = self._manager.lease(full)
        for line in it.lines:
            line.close()
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
        return [self._cancel(it, reason, now)]  # who gave it up need not be told that it is

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
        self, worker: str, message: Reserve | Data | Part | Commit | Hold, now: float
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
        used = sum(len(it.lines) for it in self._moves.values())
        deny = refusal(manager, message, self._limits, used, self._rows)
        if deny is not None:
            return [Send(worker, deny)]
        tokens, naming = unpack_tokens(message.tokens), message.naming
        rooms = rooms_of(message, len(tokens), manager.block_size, self._rows)
        lines: list[Incoming] = []
        try:
            if rooms:  # all of its tokens are computed
                ends = [len(tokens), *(blocks * manager.block_size for blocks in rooms)]
                lines.append(Incoming(manager, open_on(manager, tokens, naming), tokens))
            else:
                ends = [len(tokens) + message.headroom]
                seq = manager.open(tokens, naming.namespace, naming.public, naming.extra)
                lines.append(Incoming(manager, seq, tokens))
            for _ in rooms:
                lines.append(Incoming(manager, manager.open(), tokens[:0]))
            copies = reserve(list(zip(lines, ends, strict=True)))
        except (OutOfBlocks, OutOfSequences) as error:
            for line in lines:
                line.close()
            return [Send(worker, Deny(*move, reason=str(error), retry_after=self._limits.retry))]
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        it = Arrival(
            move,
            worker,
            lease,
            naming,
            message.headroom,
            lines[0],
            [*lines[1:]],
            lines[0].have,
            now,
            now,
        )
        self._moves[move] = it
        return [*copies, Send(worker, it.grant())]

    def _data(self, it: Arrival, data: Data, now: float) -> list[Action]:
        malformed = f"data of tokens [{data.start}, {data.stop}) is malformed"
        if not 0 <= data.start < data.stop or len(data.tokens) != 4 * (data.stop - data.start):
            return self._abandon(it, malformed, now)
        tokens = unpack_tokens(data.tokens)
        if (tokens < 0).any():
            return self._abandon(it, malformed, now)
        line = it.line(data.line)
        if line is None:
            if it.parted:  # of a sample that has ended
                return self._say(it, it.renewal(), now)
            return self._again(it, data.number, 0, it.common.have, now)
        if data.start > len(line.tokens):  # of what lies between not even the tokens are known
            return self._again(it, data.number, data.line, line.have, now)
        known = line.tokens[data.start : data.stop]
        if not np.array_equal(known, tokens[: len(known)]):
            return self._abandon(it, f"tokens [{data.start}, {data.stop}) are not those known", now)
        copies: list[Copy] = []
        if data.stop > line.end:
            if not line.is_open:
                return self._abandon(it, malformed, now)
            if line.have < data.start:
                return self._again(it, data.number, data.line, line.have, now)
            try:
                copies = line.grow(data.stop)
            except (OutOfBlocks, ValueError) as error:
                return self._abandon(it, f"no room to grow: {error}", now)
        line.tokens = np.concatenate([line.tokens, tokens[len(known) :]])
        start = max(data.start, line.base)
        if start >= data.stop or not line.missing(start, data.stop):
            return self._say(it, it.renewal(), now)
        it.state = ReceiverState.RECEIVING
        slots = line.slots[start - line.base : data.stop - line.base]
        it.writing = Write(it.worker, data, start, slots)
        return [*copies, it.writing]

    def _part(self, it: Arrival, part: Part, now: float) -> list[Action]:
        """The samples have lines of their own from here on, where all in common is there."""
        if it.parted:
            return self._say(it, it.renewal(), now)
        have = it.common.have
        try:
            own = [None if data is None else unpack_tokens(data) for data in part.own]
        except FrameError:
            own = []
        negative = any(tokens is not None and (tokens < 0).any() for tokens in own)
        if len(own) != len(it.own) or negative or part.common < max(have, 1):
            return self._abandon(it, f"that samples part at {part.common} is malformed", now)
        if have < part.common:
            return self._again(it, part.number, 0, have, now)
        try:
            copies = it.part(own)
        except (OutOfBlocks, OutOfSequences, ValueError) as error:
            return self._abandon(it, f"no room for its samples: {error}", now)
        return [*copies, *self._say(it, it.renewal(), now)]

    def _try_to_complete(self, it: Arrival, commit: Commit, now: float) -> list[Action]:
        if commit.own and not it.parted:
            return self._again(it, commit.number, 0, it.common.have, now)
        totals = [commit.total, *commit.own]
        if len(totals) != 1 + (len(it.own) if it.parted else 0):
            return self._abandon(it, f"a commit of {len(totals)} lines is malformed", now)
        for i, total in enumerate(totals):
            line = it.line(i)
            have = 0 if line is None else line.have
            if have < total:
                return self._again(it, commit.number, i, have, now)
        for line, total in zip((it.common, *it.own), totals + [0] * len(it.own), strict=False):
            if line is not None and line.is_open:
                line.commit()  # which may be more than `total`: the sender was preempted meanwhile
                if not total:
                    line.close()
        it.state, it.until = ReceiverState.COMPLETE, now + self._limits.patience
        it.commit = commit
        done = Completed(it.id, commit.counts, commit.ended)
        return [*self._say(it, it.renewal(), now), done]

    def _cancelled(
        self, it: Arrival | None, worker: str, message: Cancel, now: float
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

    def _say(self, it: Arrival, message: Renew | Nack, now: float) -> list[Action]:
        it.spoke = now
        return [Send(it.worker, message)]

    def _again(
        self, it: Arrival, number: int, line: int, first_bad: int, now: float
    ) -> list[Action]:
        """Asks for a line from `first_bad` on, in answer to message `number`."""
        nack = Nack(*it.id, lease=it.lease, number=number, first_bad=first_bad, line=line)
        return self._say(it, nack, now)

    def _abandon(self, it: Arrival, reason: str, now: float) -> list[Action]:
        return [self._cancel(it, reason, now), Abandoned(it.id, reason)]

    def _cancel(self, it: Arrival, reason: str, now: float) -> Send:
        self._leave(it, reason, now)
        return Send(it.worker, Cancel(*it.id, reason=reason))

    def _leave(self, it: Arrival, reason: str, now: float) -> None:
        """Lets go of the blocks; the leading parts that were verified stay cached."""
        del self._moves[it.id]
        self._remember(it.id, reason, now)
        for line in it.lines:
            line.close()

    def _remember(self, move: MoveId, reason: str | None, now: float) -> None:
        """How a move has ended; the oldest first, for `tick`."""
        self._ended.pop(move, None)
        self._ended[move] = (now, reason)
