"""Arrays and plain facts as bytes: one framed, checksummed record. No pickle."""

from __future__ import annotations

import itertools
import json
import zlib
from typing import Any

import numpy as np

_Array = np.ndarray[Any, np.dtype[Any]]


def pack(magic: bytes, facts: dict[str, Any], arrays: dict[str, _Array]) -> bytes:
    """magic, checksum, header length, JSON header, then the arrays' bytes, little-endian."""
    shapes = {name: [a.dtype.str, list(a.shape)] for name, a in arrays.items()}
    header = json.dumps({"facts": facts, "arrays": shapes}, separators=(",", ":")).encode()
    parts = [len(header).to_bytes(4, "little"), header]
    parts += [np.ascontiguousarray(a).tobytes() for a in arrays.values()]
    body = b"".join(parts)
    return magic + zlib.crc32(body).to_bytes(4, "little") + body


def unpack(magic: bytes, data: bytes) -> tuple[dict[str, Any], dict[str, _Array]]:
    """Inverse of `pack`. ValueError for another kind or version, truncated or damaged data."""
    if not isinstance(data, bytes):
        raise ValueError(f"a {magic!r} record is bytes, got {type(data).__name__}")
    if data[: len(magic)] != magic:
        raise ValueError(f"not a {magic!r} record: it begins with {data[: len(magic)]!r}")
    body = data[len(magic) + 4 :]
    if zlib.crc32(body).to_bytes(4, "little") != data[len(magic) : len(magic) + 4]:
        raise ValueError(f"{magic!r} record of {len(data)} bytes is truncated or damaged")
    size = int.from_bytes(body[:4], "little")
    header = json.loads(body[4 : 4 + size])
    arrays, at = {}, 4 + size
    for name, (dtype, shape) in header["arrays"].items():
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(body, dtype, count, at).reshape(shape).copy()
        at += arrays[name].nbytes
    return header["facts"], arrays


def blob(pieces: list[bytes]) -> tuple[_Array, _Array]:
    """Byte strings as (all bytes uint8, end offsets int64)."""
    ends = np.cumsum([len(p) for p in pieces], dtype=np.int64)
    return np.frombuffer(b"".join(pieces), np.uint8), ends


def unblob(data: _Array, ends: _Array) -> list[bytes]:
    """Inverse of `blob`."""
    raw = data.tobytes()
    starts = [0, *ends.tolist()]
    return [raw[a:b] for a, b in itertools.pairwise(starts)]


def name_to_json(namespace: str | bytes | None, extra: bytes | None) -> list[Any]:
    """A sequence's naming facts as JSON values; text and bytes stay different."""
    binary = isinstance(namespace, bytes)
    space = namespace.hex() if isinstance(namespace, bytes) else namespace
    return [space, binary, None if extra is None else extra.hex()]


def name_from_json(value: list[Any]) -> tuple[str | bytes | None, bytes | None]:
    """Inverse of `name_to_json`."""
    space, binary, extra = value
    return bytes.fromhex(space) if binary else space, None if extra is None else bytes.fromhex(
        extra
    )
