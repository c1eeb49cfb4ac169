"""What travels between a front and a core in another process, as msgpack bytes.

Plain values only: a frame is decoded by the types of its fields, and nothing in it can name code.
"""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import numpy as np

from pagedkv.engine.facts import Facts
from pagedkv.engine.status import CoreStatus
from pagedkv.scheduling.messages import Abort, Add, Delta, Drain, Message, Resume, StepStats
from pagedkv.transfer.departure import Mode


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A question that is answered between two steps; `id` is the asker's, for the answer."""

    id: int
    kind: str
    argument: str = ""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """`value`: what `json.dumps` takes, or bytes; `error` instead says why there is none."""

    id: int
    value: Any = None
    error: str | None = None


class Batch(msgspec.Struct, frozen=True, tag=True):
    """What an iteration of the core has brought.

    `applied`: messages that have been taken since the start, in the order they were sent.
    `status`: after the iteration; None where there was none.
    """

    deltas: tuple[Delta, ...]
    stats: StepStats | None
    applied: int
    status: CoreStatus | None = None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The core has its model and takes messages."""

    facts: Facts


class Died(msgspec.Struct, frozen=True, tag=True):
    """The core runs no more steps; `kind` is the name of the exception."""

    kind: str
    reason: str


class Configure(msgspec.Struct, frozen=True, tag=True):
    """What the core is to be made of: arguments of `LLM`, tiers as those of `TierConfig`.

    slow_step: seconds after which a step is reported in the log. kv_events: ZeroMQ endpoint and
    topic at which it publishes what its cache does; None: it does not.
    """

    arguments: dict[str, Any]
    slow_step: float = 60.0
    kv_events: tuple[str, str] | None = None


class Close(msgspec.Struct, frozen=True, tag=True):
    """Run nothing more, complete the files, end."""


# Of requests that move between workers. A core knows a request as "<request_id>@<epoch>".


class Move(msgspec.Struct, frozen=True, tag=True):
    """Move a request to worker `to`, which will own it under `epoch`.

    mode: "prefilled": K/V go while the prompt is computed, and it stands still when its first token
    is drawn. "live": it goes on until less than a block is missing there.
    """

    request_id: str
    epoch: int
    to: str
    mode: Mode = "prefilled"


class FromPeer(msgspec.Struct, frozen=True, tag=True):
    """What another worker has sent."""

    worker: str
    frame: bytes


class Own(msgspec.Struct, frozen=True, tag=True):
    """The request is this core's from now on, under this epoch."""

    request_id: str
    epoch: int


class Disown(msgspec.Struct, frozen=True, tag=True):
    """What is here of the request under this epoch is given up, without a word."""

    request_id: str
    epoch: int


class PeerGone(msgspec.Struct, frozen=True, tag=True):
    """The worker has died, or cannot be reached any more."""

    worker: str


class ToPeer(msgspec.Struct, frozen=True, tag=True):
    """To be handed to worker `worker`, as FromPeer of this one."""

    worker: str
    frame: bytes


class Complete(msgspec.Struct, frozen=True, tag=True):
    """All K/V of a request that is moved here has come; Own or Disown is the answer.

    counts, ended: of each sample, what its owner so far had reported when it stood still.
    """

    request_id: str
    epoch: int
    counts: tuple[int, ...]
    ended: tuple[bool, ...]


class MoveFailed(msgspec.Struct, frozen=True, tag=True):
    """From the old owner: the request goes on there. From the new one: it is not there.

    ended: it is at the old owner no more, but has ended.
    """

    request_id: str
    epoch: int
    reason: str
    ended: bool = False


class _Add(msgspec.Struct, frozen=True, tag="Add"):
    message: Add


class _Abort(msgspec.Struct, frozen=True, tag="Abort"):
    message: Abort


class _Drain(msgspec.Struct, frozen=True, tag="Drain"):
    message: Drain


class _Resume(msgspec.Struct, frozen=True, tag="Resume"):
    message: Resume


MoveOrder = Move | FromPeer | Own | Disown | PeerGone
MoveNews = ToPeer | Complete | MoveFailed
ToCore = Message | Ask | Configure | Close | MoveOrder
FromCore = Ready | Batch | Answer | Died | MoveNews

_FRAMES = {Add: _Add, Abort: _Abort, Drain: _Drain, Resume: _Resume}


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise TypeError(f"{value!r:.100} cannot be sent")


def _decode(kind: Any, value: Any) -> Any:
    if typing.get_origin(kind) is np.ndarray and isinstance(value, bytes):
        dtype = typing.get_args(typing.get_args(kind)[1])[0]
        return np.frombuffer(value, dtype)
    raise ValueError(f"{value!r:.100} is no {kind}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode)
_TO_CORE = msgspec.msgpack.Decoder(
    _Add | _Abort | _Drain | _Resume | Ask | Configure | Close | MoveOrder, dec_hook=_decode
)
_FROM_CORE = msgspec.msgpack.Decoder(Ready | Batch | Answer | Died | MoveNews, dec_hook=_decode)


def pack(frame: ToCore | FromCore) -> bytes:
    """The frame as bytes. TypeError: it holds what is no plain value."""
    wrap = _FRAMES.get(type(frame))  # msgspec tells only its own classes apart in a union
    return _ENCODER.encode(frame if wrap is None else wrap(frame))


def unpack_to_core(data: bytes) -> ToCore:
    """msgspec.DecodeError: no such frame."""
    frame = _TO_CORE.decode(data)
    return frame.message if isinstance(frame, (_Add, _Abort, _Drain, _Resume)) else frame


def unpack_from_core(data: bytes) -> FromCore:
    """msgspec.DecodeError: no such frame."""
    frame: FromCore = _FROM_CORE.decode(data)
    return frame
