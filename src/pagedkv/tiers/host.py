"""Blocks in host memory: one arena of fixed size, never more, and a tier below it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from pagedkv.errors import ConfigError
from pagedkv.tiers.interface import Tier, TierStats, UInt8, check_payload
from pagedkv.tiers.names import BlockName


class HostTier:
    """A `Tier` of at most `capacity` bytes of payloads, taken from the system as they are used.

    below: where blocks go that are evicted here, and all that are left when this is closed; what is
        found there comes up again. It is closed with this one.
    write_through: blocks are stored below at once; `put` is true when they are there.

    ConfigError unless at least one block fits.
    """

    def __init__(
        self,
        capacity: int,
        block_bytes: int,
        below: Tier | None = None,
        write_through: bool = False,
    ) -> None:
        slots = capacity // block_bytes if block_bytes > 0 else 0
        if slots < 1:
            raise ConfigError(
                f"a host tier of {capacity} bytes holds no block of {block_bytes} bytes: give more"
            )
        self.block_bytes, self.stats = block_bytes, TierStats()
        self._below, self._write_through = below, write_through
        try:  # pages come when they are written
            self._arena = np.empty((slots, block_bytes), np.uint8)
        except (MemoryError, ValueError) as error:
            raise ConfigError(f"a host tier of {capacity} bytes: {error}: give less") from error
        self._free = list(range(slots - 1, -1, -1))
        self._found: OrderedDict[BlockName, tuple[int, bytes]] = OrderedDict()  # oldest use first

    @property
    def off(self) -> str | None:
        return None if self._below is None else self._below.off

    def contains(self, names: Sequence[BlockName]) -> list[bool]:
        found = [name in self._found for name in names]
        if self._below is not None and not all(found):
            missing = [i for i, there in enumerate(found) if not there]
            there_below = self._below.contains([names[i] for i in missing])
            for i, there in zip(missing, there_below, strict=True):
                found[i] = there
        return found

    def get(self, name: BlockName, tokens: bytes, out: UInt8) -> bool:
        check_payload(out, self.block_bytes)
        slot, stored = self._found.get(name, (-1, b""))
        if slot < 0 or stored != tokens:
            self.stats.misses += 1
            if slot >= 0 or self._below is None or not self._below.get(name, tokens, out):
                return False
            self._keep(name, tokens, out)
            return True
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
        through = self._below if self._write_through else None
        if through is not None and not through.put(name, tokens, data):
            self.stats.refused += 1
            return False
        self._keep(name, tokens, data)
        self.stats.stored += 1
        return True

    def num_blocks(self) -> int:
        return len(self._found)

    def close(self) -> None:
        if self._below is not None:
            while self._found:
                self._demote()
            self._below.close()
        self._found.clear()
        self._free, self._arena = [], np.empty((0, self.block_bytes), np.uint8)

    def _keep(self, name: BlockName, tokens: bytes, data: UInt8) -> None:
        if not self._free:
            self._demote()
            self.stats.evicted += 1
        slot = self._free.pop()
        self._arena[slot] = data
        self._found[name] = slot, tokens

    def _demote(self) -> None:
        """Sends the least recently used block below, if it is not there."""
        name, (slot, tokens) = self._found.popitem(last=False)
        if self._below is not None and not self._write_through:
            self._below.put(name, tokens, self._arena[slot])
        self._free.append(slot)
