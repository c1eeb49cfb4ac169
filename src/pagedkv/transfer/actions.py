"""What the machines want done. The host carries actions out in order, between two steps."""

from __future__ import annotations

from typing import NamedTuple

from pagedkv.cache.types import Int32, Int64
from pagedkv.transfer.messages import Commit, Data, Message, MoveId


class Send(NamedTuple):
    """Give the message to the worker `to`. It may get lost."""

    to: str
    message: Message


class SendData(NamedTuple):
    """Read `blocks` (int32 [k]) of the K/V store, give them to the transport, and send `data`.

    The host fills in `data.checksums` and `data.payload` (see `payload.filled`). K/V is read at
    once, before the next step: later the blocks may be somebody else's.
    """

    to: str
    data: Data
    blocks: Int32


class Free(NamedTuple):
    """The payloads of data up to message `number` are no longer needed by the transport."""

    move: MoveId
    number: int


class Park(NamedTuple):
    """Take the request out of the steps, and call `parked`: little remains to be sent.

    Less than a block, or as much as is computed while it is sent. remaining: tokens whose K/V is
    not yet at the receiver.
    """

    move: MoveId
    remaining: int


class Released(NamedTuple):
    """The receiver owns the request: free what it holds here, report nothing."""

    move: MoveId


class Reclaimed(NamedTuple):
    """The move has failed: the request goes on here. Tell the front end why."""

    move: MoveId
    reason: str


class Copy(NamedTuple):
    """Copy blocks: int32 [c, 3], rows (source block, destination block, filled slots)."""

    copies: Int32


class Write(NamedTuple):
    """Verify the payload of `data`, write it, and call `written` with what came of it.

    Tokens [start, data.stop) go to `slots`, int64 [data.stop - start]; `worker` sent them.
    """

    worker: str
    data: Data
    start: int
    slots: Int64

    @property
    def move(self) -> MoveId:
        return self.data.move


class Completed(NamedTuple):
    """All K/V is here and verified: tell the front end, which answers with own or disown."""

    move: MoveId
    counts: tuple[int, ...]
    ended: tuple[bool, ...]


class Resumed(NamedTuple):
    """The request is ours: give it to the scheduler, as one that was preempted.

    `commit.state` says what it is. Call `admitted` when it first runs, or has ended.
    """

    move: MoveId
    commit: Commit


class Abandoned(NamedTuple):
    """A move to this worker has failed. What had come of it stays cached under its names."""

    move: MoveId
    reason: str


Action = (
    Send
    | SendData
    | Free
    | Park
    | Released
    | Reclaimed
    | Copy
    | Write
    | Completed
    | Resumed
    | Abandoned
)
