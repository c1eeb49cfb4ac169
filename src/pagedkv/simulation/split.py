"""Prefill and decode on devices of their own: in which ratio, and what that gives a device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagedkv.errors import ConfigError

_MOST = 1000  # devices


@dataclass(frozen=True, slots=True)
class Rates:
    """Requests a second that one device bears: prefilling alone, decoding alone, doing both."""

    prefill: float
    decode: float
    colocated: float

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "colocated"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name}={getattr(self, name)}: give at least 0 requests a second"
                )


@dataclass(frozen=True, slots=True)
class Split:
    """So many devices that prefill, and so many that decode. goodput: requests a second, each."""

    prefill: int
    decode: int
    goodput: float

    @property
    def devices(self) -> int:
        return self.prefill + self.decode


def splits(rates: Rates, devices: int) -> list[Split]:
    """For every number of devices from 2 to `devices` the best split of them.

    All devices together bear what the weaker side does: min(P * prefill, D * decode) requests a
    second, so a device gives as much over P + D. Of splits that are equally good the one with fewer
    prefill devices. O(devices ** 2). ConfigError for fewer than 2, and for more than 1,000.
    """
    if devices < 2:
        raise ConfigError(f"devices={devices}: a split takes at least 2")
    if devices > _MOST:
        raise ConfigError(f"devices={devices}: give at most {_MOST}, larger splits repeat these")
    return [
        max(
            (
                Split(p, n - p, min(p * rates.prefill, (n - p) * rates.decode) / n)
                for p in range(1, n)
            ),
            key=lambda split: split.goodput,
        )
        for n in range(2, devices + 1)
    ]


def best_split(rates: Rates, devices: int) -> Split:
    """The split of at most so many devices that gives most a device; the smallest of equals."""
    return max(splits(rates, devices), key=lambda split: split.goodput)
