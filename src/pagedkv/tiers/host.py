"""Blocks in host memory: one arena of fixed size, never more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from pagedkv.errors import ConfigError
from pagedkv.tiers.interface import TierStats, UInt8, check_payload
from pagedkv.tiers.names import BlockName


class HostTier:
    """A `Tier` of at most `capacity` bytes of payloads, taken from the system as they are used.

    ConfigError unless at least one block fits.
    """

    def __init__(self, capacity: int, block_bytes: int) -> None:
        slots = capacity // block_bytes if block_bytes > 0 else 0
        if slots < 1:
            raise ConfigError(
                f"a host tier of {capacity} bytes holds no block of {block_bytes} bytes: give more"
            )
        self.block_bytes, self.stats = block_bytes, TierStats()
        try:  # pages come when they are written
            self._arena = np.empty((slots, block_bytes), np.uint8)
        except (MemoryError, ValueError) as error:
            raise ConfigError(f"a host tier of {capacity} bytes: {error}: give less") from error
        self._free = list(range(slots - 1, -1, -1))
        self._found: OrderedDict[BlockName, tuple[int, bytes]] = OrderedDict()  # oldest use first

    def contains(self, names: Sequence[BlockName]) -> list[bool]:
        return [name in self._found for name in names]

    def get(self, name: BlockName, tokens: bytes, out: UInt8) -> bool:
        check_payload(out, self.block_bytes)
        slot, stored = self._found.get(name, (-1, b""))
        if slot < 0 or stored != tokens:
            self.stats.misses += 1
            return False
        self._found.move_to_end(name)
        out[:] = self._arena[slot]
        self.stats.hits += 1
        return True

    def put(self, name: BlockName, tokens: bytes, data: UInt8) -> bool:
        check_payload(data, self.block_bytes)
        if name in self._found:
            self._found.move_to_end(name)
            return True
        if not self._free and not self._found:  # closed
            self.stats.refused += 1
            return False
        if not self._free:
            _, (slot, _) = self._found.popitem(last=False)
            self._free.append(slot)
            self.stats.evicted += 1
        slot = self._free.pop()
        self._arena[slot] = data
        self._found[name] = slot, tokens
        self.stats.stored += 1
        return True

    def num_blocks(self) -> int:
        return len(self._found)

    def close(self) -> None:
        self._found.clear()
        self._free, self._arena = [], np.empty((0, self.block_bytes), np.uint8)
