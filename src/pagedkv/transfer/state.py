"""The state of a sequence as bytes: all that a request is, beside its K/V. Never pickle.

What moves is what the scheduler takes in to go on with a request elsewhere, a `Resume`: its prompt,
the tokens that each sample has drawn, parameters, seed, tenant, and times. Drawing is a function of
(seed + index, position) and of the tokens, so there is no other state of a sampler, of penalties or
of a grammar; stop strings are found by the front end, which does not move. Names of blocks are
functions of the tokens, see `Naming`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from pagedkv.errors import PagedKVError

STATE_VERSION = 1
Kind = TypeVar("Kind")

_ENCODER = msgspec.msgpack.Encoder()


class StateError(PagedKVError, ValueError):
    """Bytes that are no sequence's state of this version."""


def pack_state(resume: Any) -> bytes:
    """A few hundred bytes beside the tokens: a version, then msgpack. TypeError: no plain value."""
    return bytes([STATE_VERSION]) + _ENCODER.encode(resume)


def unpack_state(data: bytes, kind: type[Kind]) -> Kind:
    """The inverse of `pack_state`. StateError: another version, or no state of a `kind`."""
    if data[:1] != bytes([STATE_VERSION]):
        found = data[0] if data else "missing"
        raise StateError(
            f"version {found} of a sequence's state, this worker reads {STATE_VERSION}: "
            "run the same release on all workers"
        )
    try:
        return msgspec.msgpack.decode(data[1:], type=kind)
    except (msgspec.DecodeError, RecursionError, PagedKVError) as error:
        raise StateError(f"{len(data)} bytes are no sequence's state: {error}") from None
