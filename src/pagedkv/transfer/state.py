"""`SequenceState`: all that a request is, beside its K/V. Versioned msgpack, never pickle."""

from __future__ import annotations

import msgspec

from pagedkv.errors import PagedKVError

STATE_VERSION = 1


class StateError(PagedKVError, ValueError):
    """Bytes that are no SequenceState of this version."""


class OutputState(msgspec.Struct, frozen=True, array_like=True):
    """One sample or beam. tokens: drawn so far, int32 little-endian.

    Drawing is a function of (seed + index, position) and of the tokens, so there is no other state
    of a sampler, a penalty or a grammar to carry.
    """

    tokens: bytes
    finish_reason: str | None = None
    logprob: float = 0.0


class Clocks(msgspec.Struct, frozen=True, array_like=True):
    """Ages in seconds when the state was made: the clocks of two workers differ. None: not yet."""

    arrival: float = 0.0
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    deadline: float | None = None  # seconds that are left; below 0: it has passed


class SequenceState(msgspec.Struct, frozen=True, array_like=True):
    """A request with all its samples, as one that was preempted.

    add: what the scheduler took in, packed by the engine without the prompt: sampling parameters,
    seed, tenant, priority, SLOs. prompt: int32 little-endian. facts: what else the scheduler has
    to know of it, by name (prefix hits of its first admission, prompt log-probabilities reported).
    """

    add: bytes
    prompt: bytes
    outputs: tuple[OutputState, ...]
    clocks: Clocks = Clocks()
    facts: dict[str, int | float] = {}


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(SequenceState)


def pack_state(state: SequenceState) -> bytes:
    """A few hundred bytes beside the tokens."""
    return bytes([STATE_VERSION]) + _ENCODER.encode(state)


def unpack_state(data: bytes) -> SequenceState:
    """StateError: another version, or no state."""
    if data[:1] != bytes([STATE_VERSION]):
        found = data[0] if data else "missing"
        raise StateError(
            f"version {found} of a sequence's state: this worker reads {STATE_VERSION}; "
            "run the same release on all workers"
        )
    try:
        return _DECODER.decode(data[1:])
    except msgspec.DecodeError as error:
        raise StateError(f"{len(data)} bytes are no sequence's state: {error}") from None
