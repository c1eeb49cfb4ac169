"""Fingerprints of prefixes: one number a slot that stands for every token up to and with it.

F(i) = K * F(i - 1) + mix(token i) modulo 2**64, F before the first token 0. Written out,
F(i) = K**(i + 1) * (F_before + sum over q <= i of mix(token q) * K**-(q + 1)), so whole rows are
computed by cumulative sums, without a loop over tokens. Not cryptographic: it finds mistakes,
not attacks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagedkv.cache.table import repeat_ranges
from pagedkv.cache.types import Int32, Int64

UInt64 = npt.NDArray[np.uint64]

_FACTOR = 0x9E3779B97F4A7C15  # odd: it has an inverse modulo 2**64
_INVERSE = pow(_FACTOR, -1, 2**64)


class PrefixPrints:
    """Extends fingerprints; keeps the powers of the factor that it has needed."""

    def __init__(self) -> None:
        self._powers = self._inverses = np.zeros(0, np.uint64)

    def extend(self, before: UInt64, tokens: Int32, counts: Int64) -> UInt64:
        """Fingerprints of ragged rows of tokens (flat [sum counts]) that follow `before` [n]."""
        values = _mix(tokens)
        if not len(tokens):
            return values
        if len(counts) == len(tokens) and np.count_nonzero(counts == 1) == len(counts):
            return before * np.uint64(_FACTOR) + values  # a decode step
        self._grow(int(counts.max(initial=0)))
        if len(counts) == 1:
            sums = np.cumsum(values * self._inverses[: len(values)], dtype=np.uint64)
            sums += before
            sums *= self._powers[: len(values)]
            return sums
        owner, place = repeat_ranges(counts)
        sums = np.cumsum(values * self._inverses[place], dtype=np.uint64)
        firsts = np.cumsum(counts) - counts
        earlier = np.where(firsts > 0, sums[np.maximum(firsts, 1) - 1], np.uint64(0))
        prints: UInt64 = self._powers[place] * (sums + (before - earlier)[owner])
        return prints

    def _grow(self, n: int) -> None:
        if n > len(self._powers):
            size = max(64, 2 * n)
            self._powers = np.cumprod(np.full(size, _FACTOR, np.uint64), dtype=np.uint64)
            self._inverses = np.cumprod(np.full(size, _INVERSE, np.uint64), dtype=np.uint64)


def _mix(tokens: Int32) -> UInt64:
    """The first half of splitmix64's finaliser (Steele, Lea, Flood 2014), elementwise."""
    value = tokens.astype(np.uint64)
    value += np.uint64(0x632BE59BD9B4E019)
    value ^= value >> np.uint64(30)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    return value
