"""Moving requests between simulated workers: the machines of `transfer`, and K/V that take time.

What a host does for the machines, with nothing to read or to write: a payload is its size. The
state of a request travels as the object that it is; its bytes are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from pagedkv.cache import SeqId
from pagedkv.engine.core import EngineCore
from pagedkv.scheduling.messages import Add, Resume
from pagedkv.scheduling.namespaces import namespace_bytes
from pagedkv.scheduling.request import Request
from pagedkv.transfer.actions import (
    Abandoned,
    Action,
    Completed,
    Reclaimed,
    Released,
    Resumed,
    Send,
    SendData,
    Write,
)
from pagedkv.transfer.endpoint import Endpoint
from pagedkv.transfer.limits import TransferLimits
from pagedkv.transfer.messages import (
    Commit,
    Data,
    Grant,
    Hello,
    Message,
    MoveId,
    Naming,
    Reserve,
)

HEADER_BYTES = 100  # of a message beside what it carries
STATE_BYTES = 400  # of a request beside its tokens


class MoverHost(Protocol):
    """Whom a mover tells of what happens, and who carries its messages."""

    def post(self, to: str, message: Message, num_bytes: int, pieces: int) -> None: ...

    def completed(self, move: MoveId, counts: tuple[int, ...], ended: tuple[bool, ...]) -> None: ...

    def failed(self, move: MoveId, reason: str) -> None: ...


@dataclass(slots=True)
class _Outgoing:
    """A request on its way out. entered: the scheduler has seen it. held: its K/V, once parked."""

    request_id: str
    entered: bool = False
    held: SeqId | None = None


@dataclass(slots=True)
class MoveCounts:
    """What a worker has moved. blocks_sent: of its own block size, those in part included.

    tokens_there: that were not sent, for the receiver had them.
    """

    sent: int = 0
    received: int = 0
    failed: int = 0
    blocks_sent: int = 0
    tokens_there: int = 0


class Mover:
    """Both sides of all moves of one worker. Called between two steps only.

    parked: requests between two workers, by move; common to all workers.
    """

    def __init__(
        self,
        name: str,
        core: EngineCore,
        token_bytes: int,
        limits: TransferLimits,
        host: MoverHost,
        parked: dict[MoveId, Resume],
    ) -> None:
        self._core, self._host, self._token_bytes = core, host, token_bytes
        self._manager = manager = core.scheduler.manager
        # One layer with one head, as wide as makes a token's K/V that many bytes.
        width = max(1, token_bytes // 8)
        ours = Hello(name, 1, b"", 1, 1, width, "float32", manager.block_size, manager.num_blocks)
        self.endpoint = Endpoint(manager, ours, limits)
        self.tally = MoveCounts()
        self.granted: list[str] = []  # requests that have got room here since this was last cleared
        self._parked = parked
        self._outgoing: dict[MoveId, _Outgoing] = {}
        self._adopted: dict[MoveId, str] = {}  # owned, and not admitted yet

    @property
    def busy(self) -> bool:
        """Whether time alone can bring something to do."""
        return bool(self._outgoing or self.endpoint.receiver.moves)

    def start(self, add: Add, move: MoveId, to: str, headroom: int, now: float) -> None:
        """The request, which has just come, is to go on at `to` as soon as it is prefilled."""
        self._outgoing[move] = _Outgoing(add.request_id)
        naming = Naming(namespace_bytes(add.tenant, add.cache_salt))
        tokens = np.array(add.prompt, np.int32)
        self._do(self.endpoint.start(move, to, tokens, naming, "prefilled", headroom, now), now)

    def handle(self, worker: str, message: Message, now: float) -> None:
        """A message of another worker."""
        self._do(self.endpoint.handle(worker, message, now), now)
        if isinstance(message, Hello):
            return
        if message.move in self._outgoing:
            if isinstance(message, Grant):
                self.tally.tokens_there += message.have
            self._progress(message.move, now)

    def own(self, move: MoveId, now: float) -> None:
        """The front end has made this worker the owner."""
        self._do(self.endpoint.own(move, now), now)

    def disown(self, move: MoveId, reason: str, now: float) -> None:
        """The front end has no use for the copy."""
        self._do(self.endpoint.disown(move, reason, now), now)

    def stepped(self, now: float) -> None:
        """A step has ended: parks what is prefilled, sends what was computed."""
        for move, out in list(self._outgoing.items()):
            out.entered = True
            self._progress(move, now)
        for move, request_id in list(self._adopted.items()):
            request = self._core.scheduler.roster.requests.get(request_id)
            if request is None or request.branches:
                del self._adopted[move]
                self._do(self.endpoint.admitted(move, now), now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._do(self.endpoint.tick(now), now)
        for move in list(self._outgoing):
            self._progress(move, now)

    def _progress(self, move: MoveId, now: float) -> None:
        out = self._outgoing[move]
        if out.held is not None:
            self._do(self.endpoint.progress(move, out.held, now), now)
            return
        request = self._core.scheduler.roster.requests.get(out.request_id)
        if not out.entered:
            return
        if request is None:  # it has ended, with its first token or by an error
            del self._outgoing[move]
            self._do(self.endpoint.cancel(move, "the request has ended"), now)
        elif request.started:
            self._park(move, out, request, now)
        elif request.branches:
            self._do(self.endpoint.progress(move, request.branches[0].seq, now), now)

    def _park(self, move: MoveId, out: _Outgoing, request: Request, now: float) -> None:
        """Takes the request out of the steps and holds its K/V by name."""
        namespace, public = request.namespace, request.public
        resume = self._core.release(out.request_id, now)
        tokens = np.array([*resume.add.prompt, *resume.outputs[0].tokens], np.int32)
        out.held = self._manager.open(tokens, namespace, public)
        self._parked[move] = resume
        counts = tuple(len(output.tokens) for output in resume.outputs)
        ended = tuple(output.finish_reason is not None for output in resume.outputs)
        self._do(self.endpoint.parked(move, out.held, b"", counts, ended, now), now)

    def _do(self, actions: list[Action], now: float) -> None:
        for action in actions:
            match action:
                case Send(to, message):
                    self._host.post(to, message, _size(message), 1)
                    if isinstance(message, Grant):
                        self.granted.append(message.request)
                case SendData(to, data, blocks):
                    self.tally.blocks_sent += len(blocks)
                    payload = (data.stop - data.start) * self._token_bytes
                    self._host.post(to, data, payload + _size(data), len(blocks))
                case Write():
                    self._do(self.endpoint.written(action.move, None, now), now)
                case Completed(move, counts, ended):
                    self._host.completed(move, counts, ended)
                case Resumed(move):
                    self.tally.received += 1
                    self._adopt(move)
                case Released(move):
                    self.tally.sent += 1
                    self._let_go(move)
                case Reclaimed(move, reason):
                    self.tally.failed += 1
                    if self._let_go(move):
                        self._core.send(self._parked.pop(move))
                    self._host.failed(move, reason)
                case Abandoned(move, reason):
                    self._host.failed(move, reason)
                case _:  # copies and buffers, of which there are none
                    pass

    def _adopt(self, move: MoveId) -> None:
        resume = self._parked.pop(move)
        add = replace(resume.add, request_id=move.owned_id)
        self._core.send(replace(resume, add=add))
        self._adopted[move] = move.owned_id

    def _let_go(self, move: MoveId) -> bool:
        """Releases what was held for a move; whether it was parked."""
        out = self._outgoing.pop(move)
        if out.held is None:
            return False
        self._manager.close(out.held)
        return True


def _size(message: Message) -> int:
    """Bytes of a message on the wire, without payloads."""
    match message:
        case Reserve() | Data():
            return HEADER_BYTES + len(message.tokens)
        case Commit():
            return HEADER_BYTES + STATE_BYTES
    return HEADER_BYTES
