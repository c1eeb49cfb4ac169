"""What two workers say to each other about a move, and how it travels as bytes.

A move is one attempt to bring a request to another worker. It is named by the request and by the
epoch that the new owner will have; a front end never gives an epoch twice.

K/V travel in *lines*. Line 0 is what the samples of a request have in common: of a lone sample, all
that it has. When samples have parted, line i is that of the i-th of them, from there on.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import xxhash

from pagedkv.cache.types import Int32
from pagedkv.errors import PagedKVError

PROTOCOL = 2
_CHECKSUM_BYTES = 8

# What a frame may have: a peer that says anything else has said nothing.
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]  # of tokens, or a place among them
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class FrameError(PagedKVError, ValueError):
    """Bytes that are no frame of this protocol, or not as they were sent."""


class MoveId(NamedTuple):
    """One attempt to move `request`: its owner will have `epoch`."""

    request: str
    epoch: int

    @property
    def owned_id(self) -> str:
        """The id that the request has at the worker which owns it in this epoch."""
        return f"{self.request}@{self.epoch}"


def split_owned_id(owned_id: str) -> MoveId:
    """The inverse of `MoveId.owned_id`. ValueError for an id without an epoch."""
    request, _, epoch = owned_id.rpartition("@")
    if not request or not epoch.isdecimal():
        raise ValueError(f"request id {owned_id!r:.200} has no epoch: it must be '<id>@<epoch>'")
    return MoveId(request, int(epoch))


class Naming(msgspec.Struct, frozen=True, array_like=True):
    """Who else may find the blocks: the arguments of `BlockManager.open` beside the tokens."""

    namespace: bytes | None = None
    public: Count = 0
    extra: bytes | None = None


class Hello(msgspec.Struct, frozen=True, tag=True):
    """What a worker is: sent before anything else, compared by `handshake.refusal`.

    boot: a larger number each time the worker is started. model: a digest of all that K/V depend on
    beside the tokens, but for what is named here. wants_answer: the peer's own Hello is wanted.
    Later protocols may add fields, with defaults, and keep these.
    """

    worker: str
    boot: int
    model: bytes
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    num_blocks: int
    protocol: int = PROTOCOL
    wants_answer: bool = False


class _OfMove(msgspec.Struct, frozen=True, tag=True):
    request: str
    epoch: int

    @property
    def move(self) -> MoveId:
        return MoveId(self.request, self.epoch)


class Reserve(_OfMove, frozen=True):
    """Sender: make room for these tokens, and `headroom` more.

    tokens: those of line 0 that are known, int32 little-endian; the receiver looks up what it has
    of them. own: of several samples, the tokens that each has beyond these; they all get headroom.
    """

    tokens: bytes
    naming: Naming
    headroom: Count = 0
    own: tuple[Count, ...] = ()


class Grant(_OfMove, frozen=True):
    """Receiver: there is room, under a lease; [0, have) of line 0 need not be sent.

    parts: whether there is room for lines of samples that part. Else they are left out.
    """

    lease: int
    have: Count
    parts: bool = False


class Deny(_OfMove, frozen=True):
    """Receiver: there is no room. Ask again after `retry_after` seconds; None: never."""

    reason: str
    retry_after: Seconds | None = None


class Data(_OfMove, frozen=True):
    """Sender: K/V of the tokens [start, stop) of a line, in blocks of the sender's block size.

    `start` is a multiple of that size; the last block may be filled in part. Each block is one
    contiguous piece (layer, K/V, token, head, head_dim), little-endian. tokens: int32
    little-endian. checksums: of each block. payload: the transport's reference to the blocks, or
    the bytes themselves. number: grows with all that the sender sends for a move.
    """

    lease: int
    number: int
    start: Count
    stop: Count
    tokens: bytes
    dtype: str
    checksums: tuple[int, ...] = ()
    payload: bytes = b""
    line: Count = 0


class Part(_OfMove, frozen=True):
    """Sender: the samples part behind `common` tokens; line 0 ends there.

    own: of each sample of the Reserve, the tokens of its line that are known, int32 little-endian:
    the receiver looks up what it has of them. None: the sample has ended, it has no line.
    """

    lease: int
    number: int
    common: Count
    own: tuple[bytes | None, ...]


class Commit(_OfMove, frozen=True):
    """Sender: K/V of `total` tokens of line 0 is all there is; the request stands still since.

    own: where samples have parted, the tokens at which their lines end; 0: the sample has ended.
    state: see `pack_state`. counts, ended: of each sample, the tokens that it has reported
    and whether it has reported its end.
    """

    lease: int
    number: int
    total: Count
    state: bytes
    counts: tuple[Count, ...]
    ended: tuple[bool, ...]
    own: tuple[Count, ...] = ()


class Renew(_OfMove, frozen=True):
    """Receiver: alive. [0, have) is there and verified; `complete`: the commit has been taken.

    own: the same of the lines of samples, once it has taken that they have parted.
    """

    lease: int
    have: Count
    complete: bool = False
    own: tuple[Count, ...] = ()


class Nack(_OfMove, frozen=True):
    """Receiver: `first_bad` of a line, and what follows, must be sent again.

    It answers message `number`.
    """

    lease: int
    number: int
    first_bad: Count
    line: Count = 0


class Hold(_OfMove, frozen=True):
    """Sender: alive, go on holding the reservation."""

    lease: int | None


class Ack(_OfMove, frozen=True):
    """Receiver: owns the request now; the sender may free what it holds."""


class Cancel(_OfMove, frozen=True):
    """Either side: the move is off."""

    reason: str


Message = Hello | Reserve | Grant | Deny | Data | Part | Commit | Renew | Nack | Hold | Ack | Cancel

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """The message as a frame: msgpack behind its own checksum."""
    body = _ENCODER.encode(message)
    return xxhash.xxh3_64_digest(body) + body


def unpack(frame: bytes) -> Message:
    """The inverse of `pack`. FrameError: truncated, changed on the way, or no message."""
    digest, body = frame[:_CHECKSUM_BYTES], frame[_CHECKSUM_BYTES:]
    if xxhash.xxh3_64_digest(body) != digest:
        raise FrameError(f"a frame of {len(frame)} bytes is not as it was sent")
    try:
        message: Message = _DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:  # in a field that nobody asks for
        raise FrameError(f"a frame of {len(frame)} bytes is no message: {error}") from None
    return message


def pack_tokens(tokens: Int32) -> bytes:
    """int32 [n] as little-endian bytes."""
    return tokens.astype("<i4", copy=False).tobytes()


def unpack_tokens(data: bytes) -> Int32:
    """The inverse of `pack_tokens`. FrameError for a broken length."""
    if len(data) % 4:
        raise FrameError(f"{len(data)} bytes are no int32 tokens")
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)
