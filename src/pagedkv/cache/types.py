"""Ids and plain values of the cache, and how outside values become arrays."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple, NewType

import numpy as np
import numpy.typing as npt

SeqId = NewType("SeqId", int)
BlockId = NewType("BlockId", int)

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Tokens = Sequence[int] | npt.NDArray[np.integer]

NULL_BLOCK = BlockId(0)
NUM_GROUPS = 1  # layer groups with tables of their own; one until a model needs more

_INT32 = np.iinfo(np.int32)


class Match(NamedTuple):
    """What `open` would find: tokens already cached, and blocks the prompt takes from the pool."""

    cached_tokens: int
    demand: int


class Reservation(NamedTuple):
    """Where the next tokens go. Arrays belong to the caller.

    group_slots: int64 [layer groups, sum k], block * block_size + offset of every reserved token.
    group_copies: one int32 [c, 3] a layer group, rows (source block, destination block, filled
    slots), to be done before any slot is written.
    """

    group_slots: Int64
    group_copies: tuple[Int32, ...]

    @property
    def slots(self) -> Int64:
        """Slots of the first layer group, int64 [sum k]."""
        slots: Int64 = self.group_slots[0]
        return slots

    @property
    def copies(self) -> Int32:
        """Copies of the first layer group, int32 [c, 3]."""
        return self.group_copies[0]


class Imported(NamedTuple):
    """A sequence opened from `export_sequence` data.

    `tokens` int32 are those whose K/V the caller writes to `reservation.slots` and then commits.
    """

    seq: SeqId
    reservation: Reservation
    tokens: Int32


def whole(value: int, what: str) -> int:
    """`value` as an int; ValueError, naming it, unless it is a whole number by type."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"{what}={value!r} must be an integer")


def token_array(tokens: Tokens) -> Int32:
    """`tokens` as int32 [n]. ValueError names a token outside int32 or of another type."""
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"tokens must be a flat integer array, got {tokens.dtype} {tokens.shape}"
            )
        if tokens.dtype != np.int32:
            wide = tokens[(tokens < _INT32.min) | (tokens > _INT32.max)]
            if len(wide):
                raise ValueError(f"token {wide[0]} is outside int32")
        return tokens.astype(np.int32, copy=False)
    if isinstance(tokens, (bytes, bytearray, memoryview, str)):
        raise ValueError(f"tokens must be integers, got {type(tokens).__name__}")
    try:
        # Twice as fast as numpy on a list, and it checks type and range on the way.
        return np.frombuffer(array("i", tokens), np.int32)
    except (OverflowError, TypeError):
        raise ValueError(f"token {_first_bad(tokens)!r} is not an int32") from None


def flatten_tokens(tokens: Sequence[Tokens] | Int32, n: int) -> tuple[Int32, Int64]:
    """Ragged `tokens` of n rows as (flat int32 [sum j], counts int64 [n])."""
    if not isinstance(tokens, (Sequence, np.ndarray)) or len(tokens) != n:
        raise ValueError(f"{n} token lists are wanted, one a sequence, got {tokens!r:.200}")
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be a list of lists or [n, j], got {tokens.shape}")
        return token_array(tokens.reshape(-1)), np.full(n, tokens.shape[1], np.int64)
    try:
        lengths = list(map(len, tokens))
    except TypeError:
        raise ValueError(f"one token list a sequence is wanted, got {tokens!r:.200}") from None
    if lengths.count(1) == n:  # a decode step
        return token_array([token for (token,) in tokens]), np.ones(n, np.int64)
    counts = np.array(lengths, np.int64)
    if np.ndarray in set(map(type, tokens)):
        rows = [token_array(row) for row in tokens]
        return np.concatenate(rows), counts
    return token_array(list(chain.from_iterable(tokens))), counts


def _first_bad(tokens: object) -> object:
    if not isinstance(tokens, Iterable):
        return tokens
    for token in tokens:
        if not hasattr(token, "__index__") or not _INT32.min <= int(token) <= _INT32.max:
            return token
    return None
