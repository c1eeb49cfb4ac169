"""A tier below the device that takes the time of a link and holds no K/V."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedkv.errors import ConfigError
from pagedkv.scheduling.step import Step, Transferred
from pagedkv.tiers.host import HostTier
from pagedkv.tiers.names import BlockName

# What stands for a payload; names and tokens are all that decides what is found.
_PAYLOAD = np.zeros(1, np.uint8)


@dataclass(frozen=True, slots=True)
class Link:
    """Between the device and `host_blocks` blocks of host memory, the same in both directions.

    A block of `block_bytes` is one piece: it takes `per_piece` seconds and its bytes at
    `bytes_per_second`. Steps wait for their transfers. ConfigError for what no link can be.
    """

    host_blocks: int
    block_bytes: int
    bytes_per_second: float
    per_piece: float = 0.0

    def __post_init__(self) -> None:
        for name in ("host_blocks", "block_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} of a link: give at least 1")
        if not 0 < self.bytes_per_second < np.inf:
            raise ConfigError(f"bytes_per_second={self.bytes_per_second}: give more than 0")
        if not 0 <= self.per_piece < np.inf:
            raise ConfigError(f"per_piece={self.per_piece}: give at least 0 seconds")

    @property
    def block_seconds(self) -> float:
        return self.per_piece + self.block_bytes / self.bytes_per_second


class LinkedTier:
    """Does the transfers of steps over a link. `below`: what a scheduler may look into."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.below = HostTier(link.host_blocks, len(_PAYLOAD))

    def move(self, step: Step) -> tuple[Transferred, ...]:
        """Stores and loads the blocks of a step; the durations are those of the link."""
        done = []
        for store in step.stores:
            names = [BlockName(name) for name in store.names]
            missing = self.below.contains(names).count(False)
            for name, tokens in zip(names, store.tokens, strict=True):
                self.below.put(name, tokens, _PAYLOAD)
            done.append(Transferred(store.id, len(names), missing * self._link.block_seconds))
        for load in step.loads:
            out, count = _PAYLOAD.copy(), 0
            for found, tokens in zip(load.names, load.tokens, strict=True):
                if not self.below.get(BlockName(found), tokens, out):
                    break
                count += 1
            done.append(Transferred(load.id, count, count * self._link.block_seconds))
        return tuple(done)
