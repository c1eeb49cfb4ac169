"""`Endpoint`: a worker's end of all moves: handshakes, what it sends, what it receives.

Sans-I/O: (event, now) -> actions, which the host carries out in order, between two steps. One
thread at a time.
"""

from __future__ import annotations

import msgspec

from pagedkv.cache import BlockManager, SeqId
from pagedkv.cache.types import Int32
from pagedkv.errors import ConfigError
from pagedkv.transfer.actions import Action, Reclaimed, Send
from pagedkv.transfer.departure import Mode
from pagedkv.transfer.handshake import refusal
from pagedkv.transfer.limits import TransferLimits
from pagedkv.transfer.messages import (
    Ack,
    Cancel,
    Deny,
    Grant,
    Hello,
    Message,
    MoveId,
    Nack,
    Naming,
    Renew,
    Reserve,
)
from pagedkv.transfer.outgoing import Parted
from pagedkv.transfer.payload import DTYPES
from pagedkv.transfer.receiver import Receiver
from pagedkv.transfer.sender import Sender


class Endpoint:
    """What the host of a worker talks to. `sender` and `receiver` are its two halves.

    manager: the worker's own; `receiver` opens and closes sequences in it, `rows` at a time; None:
    as many as there are. ours: what this worker is; `boot` must be larger than at its last start.
    ConfigError: K/V in a dtype that cannot be moved.

    The host carries out Copy, Write and SendData at once. It resolves the payload of a Data before
    it hands the message in, and calls `written` right after a Write.
    """

    def __init__(
        self,
        manager: BlockManager,
        ours: Hello,
        limits: TransferLimits | None = None,
        rows: int | None = None,
    ) -> None:
        if ours.dtype not in DTYPES:
            raise ConfigError(
                f"kv dtype {ours.dtype!r} cannot be moved between workers: "
                f"use one of {', '.join(DTYPES)}"
            )
        self.ours = ours
        self.limits = limits or TransferLimits()
        self.sender = Sender(manager, ours, self.limits)
        self.receiver = Receiver(manager, ours, self.limits, rows or manager.max_seqs)
        self._peers: dict[str, Hello] = {}  # the last Hello of each
        self._refused: dict[str, str] = {}  # why nothing moves between us
        self._gone: set[str] = set()

    def peer(self, worker: str) -> Hello:
        """What a worker is. KeyError: it has not said."""
        return self._peers[worker]

    # ---- what the host asks for ---------------------------------------------------------------

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
        """Begins a move to worker `to`; see `Sender.start`. Reclaimed at once if it is refused,
        or goes nowhere."""
        if to == self.ours.worker:
            return [Reclaimed(move, f"the request is at {to!r} already")]
        if to in self._refused:
            return [Reclaimed(move, self._refused[to])]
        asked = self.sender.start(move, to, tokens, naming, mode, headroom, now, own)
        return self._introduced(asked)

    def progress(
        self, move: MoveId, seq: SeqId, now: float, parted: Parted | None = None
    ) -> list[Action]:
        """See `Sender.progress`: for each move of `sender.moves`, after each step and batch."""
        return self.sender.progress(move, seq, now, parted)

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
        """See `Sender.parked`."""
        return self.sender.parked(move, seq, state, counts, ended, now, parted)

    def cancel(self, move: MoveId, reason: str) -> list[Action]:
        """See `Sender.cancel`."""
        return self.sender.cancel(move, reason)

    def written(self, move: MoveId, first_bad: int | None, now: float) -> list[Action]:
        """See `Receiver.written`; `payload.store` gives `first_bad`."""
        return self.receiver.written(move, first_bad, now)

    def own(self, move: MoveId, now: float) -> list[Action]:
        """See `Receiver.own`."""
        return self.receiver.own(move, now)

    def disown(self, move: MoveId, reason: str, now: float) -> list[Action]:
        """See `Receiver.disown`."""
        return self.receiver.disown(move, reason, now)

    def admitted(self, move: MoveId, now: float) -> list[Action]:
        """See `Receiver.admitted`."""
        return self.receiver.admitted(move, now)

    # ---- what happens -------------------------------------------------------------------------

    def handle(self, worker: str, message: Message, now: float) -> list[Action]:
        """A message that came from a worker; `messages.unpack` makes it of a frame."""
        match message:
            case Hello():
                return self._greeted(worker, message, now)
            case Grant() | Deny() | Renew() | Nack() | Ack():
                return self.sender.handle(worker, message, now)
            case Cancel():
                if message.move in self.sender:
                    return self.sender.handle(worker, message, now)
                return self.receiver.handle(worker, message, now)
            case Reserve() if worker in self._refused:
                return [Send(worker, Deny(*message.move, reason=self._refused[worker]))]
            case Reserve() if not self._knows(worker):
                return [Send(worker, self._hello(wants_answer=True))]
        return self.receiver.handle(worker, message, now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed: to be called several times in `limits.retry` seconds."""
        return [*self._introduced(self.sender.tick(now)), *self.receiver.tick(now)]

    def peer_gone(self, worker: str, now: float) -> list[Action]:
        """The worker is dead, or cannot be reached any more. What it was is forgotten."""
        self._gone.add(worker)
        self._refused.pop(worker, None)  # another may be started in its place
        why = f"worker {worker!r} is gone"
        return [*self.sender.peer_gone(worker, why), *self.receiver.peer_gone(worker, why, now)]

    # ---- steps of the verbs -------------------------------------------------------------------

    def _knows(self, worker: str) -> bool:
        return worker in self._peers and worker not in self._gone

    def _hello(self, wants_answer: bool) -> Hello:
        return msgspec.structs.replace(self.ours, wants_answer=wants_answer)

    def _introduced(self, actions: list[Action]) -> list[Action]:
        """Asks unknown workers what they are, before anything else is asked of them."""
        return [
            a._replace(message=self._hello(wants_answer=True))
            if isinstance(a, Send) and isinstance(a.message, Reserve) and not self._knows(a.to)
            else a
            for a in actions
        ]

    def _greeted(self, worker: str, hello: Hello, now: float) -> list[Action]:
        before = self._peers.get(worker)
        if before is not None and hello.boot < before.boot:
            return []  # from before it was started again
        actions: list[Action] = []
        facts = msgspec.structs.replace(hello, wants_answer=False)
        if before is not None and facts != before:
            why = f"worker {worker!r} was started again"
            actions += self.sender.peer_gone(worker, why, granted_only=True)
            actions += self.receiver.peer_gone(worker, why, now)
        self._peers[worker] = facts
        self._gone.discard(worker)
        if hello.wants_answer:
            actions.append(Send(worker, self._hello(wants_answer=False)))
        refused = refusal(self.ours, hello)
        if refused is None:
            self._refused.pop(worker, None)
            return [*actions, *self.sender.greeted(worker, now)]
        self._refused[worker] = refused
        return [*actions, *self.sender.peer_gone(worker, refused)]
