"""K/V as bytes: checksums, conversion between dtypes, and between block sizes.

Symbols: k blocks, n tokens, L layers, B block size, G K/V heads, D head_dim.
A block is one contiguous piece [L, 2, B, G, D], little-endian.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from pagedkv.cache.types import Int32
from pagedkv.transfer.actions import SendData, Write
from pagedkv.transfer.messages import Data, Hello

UInt8 = npt.NDArray[np.uint8]
KV = npt.NDArray[Any]

# Between these K/V can be converted. numpy has no bfloat16: its bits are kept as integers.
DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "bfloat16": np.dtype("<u2")}


class Payloads(Protocol):
    """A store of K/V as payloads, uint8 [k, block_bytes] for k blocks."""

    def read(self, blocks: Int32) -> UInt8: ...

    def write(self, blocks: Int32, data: UInt8) -> None: ...


def token_bytes(hello: Hello) -> int:
    """Bytes of the K/V of one token, all layers."""
    per_token = 2 * hello.num_layers * hello.num_kv_heads * hello.head_dim
    return per_token * DTYPES[hello.dtype].itemsize


def checksums(blocks: UInt8) -> tuple[int, ...]:
    """xxh3-64 of each of k blocks, uint8 [k, block_bytes]."""
    return tuple(xxhash.xxh3_64_intdigest(block) for block in blocks)


def filled(action: SendData, blocks: UInt8, payload: bytes = b"") -> Data:
    """The message to send: `blocks` are what was read, `payload` the transport's reference.

    Without a reference the bytes themselves travel in the message.
    """
    return msgspec.structs.replace(
        action.data, checksums=checksums(blocks), payload=payload or blocks.tobytes()
    )


def as_blocks(data: Data, theirs: Hello, payload: bytes | UInt8 | None = None) -> UInt8 | None:
    """The payload as uint8 [k, block_bytes], no copy; None: it is not what its sender has.

    That is of another dtype, or not as many bytes. payload: what the transport made of the
    reference; None: the bytes are in the message.
    """
    if data.dtype != theirs.dtype:
        return None
    flat = np.frombuffer(data.payload if payload is None else payload, np.uint8)
    count = -(-(data.stop - data.start) // theirs.block_size)
    block_bytes = token_bytes(theirs) * theirs.block_size
    return flat.reshape(count, block_bytes) if len(flat) == count * block_bytes else None


def first_bad_token(data: Data, blocks: UInt8 | None, block_size: int) -> int | None:
    """The first token whose K/V is not as it was sent; None: all are. O(bytes)."""
    if blocks is None or len(data.checksums) != len(blocks):
        return data.start
    for i, (block, expected) in enumerate(zip(blocks, data.checksums, strict=True)):
        if xxhash.xxh3_64_intdigest(block) != expected:
            return data.start + i * block_size
    return None


def convert(values: KV, source: str, target: str) -> KV:
    """K/V of one dtype in another; bfloat16 as its bits. float32 -> bfloat16 rounds to even."""
    if source == target:
        return values
    if source == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = np.isnan(values)
    if nan.any():  # rounding could make an infinity of it
        rounded[nan] = (bits[nan] >> 16) | 0x40
    return rounded.astype(np.uint16)


def store(
    write: Write, blocks: UInt8 | None, ours: Hello, theirs: Hello, payloads: Payloads
) -> int | None:
    """Verifies a payload (of `as_blocks`) and writes its good part to `write.slots`.

    Returns the first bad token; None: all is written. Whole blocks of equal form are written as
    they are; blocks that are covered in part are read, changed and written.
    """
    data = write.data
    bad = first_bad_token(data, blocks, theirs.block_size)
    stop = data.stop if bad is None else bad
    if stop <= write.start or blocks is None:
        return bad
    size = ours.block_size
    slots = write.slots[: stop - write.start]
    skipped = write.start - data.start
    whole = len(slots) // size * size
    same = theirs.block_size == size and theirs.dtype == ours.dtype
    if same and skipped % size == 0 and whole and _are_whole_blocks(slots[:whole], size):
        first = skipped // size
        ids = (slots[:whole:size] // size).astype(np.int32)
        payloads.write(ids, blocks[first : first + whole // size])
        skipped, slots = skipped + whole, slots[whole:]
    if len(slots):
        first = skipped // theirs.block_size
        last = -(-(skipped + len(slots)) // theirs.block_size)
        values = _by_token(blocks[first:last], theirs)[skipped - first * theirs.block_size :]
        _scatter(payloads, slots, convert(values[: len(slots)], theirs.dtype, ours.dtype), ours)
    return bad


def _are_whole_blocks(slots: npt.NDArray[np.int64], size: int) -> bool:
    firsts = slots[::size]
    return bool((firsts % size == 0).all() and (slots[size - 1 :: size] == firsts + size - 1).all())


def _by_token(blocks: UInt8, hello: Hello) -> KV:
    """uint8 [k, block_bytes] as K/V of each token, [k * B, L, 2, G, D]."""
    values = _view(blocks, hello).transpose(0, 3, 1, 2, 4, 5)
    return values.reshape(-1, *values.shape[2:])


def _scatter(payloads: Payloads, slots: npt.NDArray[np.int64], values: KV, hello: Hello) -> None:
    """Writes K/V of tokens [n, L, 2, G, D] to slots [n]; the other slots stay as they are."""
    size = hello.block_size
    ids, places = np.unique(slots // size, return_inverse=True)
    blocks = np.ascontiguousarray(payloads.read(ids.astype(np.int32)))
    _view(blocks, hello)[places, :, :, slots % size] = values
    payloads.write(ids.astype(np.int32), blocks)


def _view(blocks: UInt8, hello: Hello) -> KV:
    """uint8 [k, block_bytes] as [k, L, 2, B, G, D], no copy."""
    shape = (hello.num_layers, 2, hello.block_size, hello.num_kv_heads, hello.head_dim)
    return np.ascontiguousarray(blocks).view(DTYPES[hello.dtype]).reshape(-1, *shape)
