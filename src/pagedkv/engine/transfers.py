"""Carrying out the transfers of a step, between an executor's K/V and the tiers below."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from pagedkv.scheduling.step import Int32, Step, Transfer, Transferred
from pagedkv.tiers.interface import Tier, UInt8
from pagedkv.tiers.names import BlockName

_BLOCKS_AT_ONCE = 16  # bounds the scratch


class Payloads(Protocol):
    """An executor's K/V as payloads, uint8 [k, block_bytes] for k blocks."""

    def read(self, blocks: Int32) -> UInt8: ...

    def write(self, blocks: Int32, data: UInt8) -> None: ...

    def copy(self, copies: Int32) -> None:
        """Int32 [c, 3]: source block, destination block, filled slots."""
        ...


class Mover:
    """Moves whole blocks between `payloads` and `tier`, the uppermost one.

    What a tier cannot store or find counts as not moved, and raises nothing.
    """

    def __init__(self, payloads: Payloads, tier: Tier) -> None:
        self._payloads, self._tier = payloads, tier

    def store(self, step: Step) -> tuple[Transferred, ...]:
        """The stores of a step, before it copies or writes."""
        return tuple(self._timed(transfer, self._store) for transfer in step.stores)

    def load(self, step: Step) -> tuple[Transferred, ...]:
        """The loads of a step, after its copies."""
        return tuple(self._timed_load(transfer) for transfer in step.loads)

    def _timed(self, transfer: Transfer, move: Callable[[Transfer], int]) -> Transferred:
        start = time.perf_counter()
        blocks = move(transfer)
        return Transferred(transfer.id, blocks, time.perf_counter() - start)

    def _timed_load(self, transfer: Transfer) -> Transferred:
        hits = self._tier.stats.hits
        done = self._timed(transfer, self._load)
        # Those that the uppermost tier did not have itself. A block that was found behind one that
        # was not is no longer among the loaded.
        return replace(done, lower=max(0, done.blocks - (self._tier.stats.hits - hits)))

    def _store(self, transfer: Transfer) -> int:
        names = [BlockName(name) for name in transfer.names]
        there = self._tier.contains(names)
        missing = [i for i, found in enumerate(there) if not found]
        for first in range(0, len(missing), _BLOCKS_AT_ONCE):
            part = missing[first : first + _BLOCKS_AT_ONCE]
            data = self._payloads.read(transfer.blocks[part])
            for i, payload in zip(part, data, strict=True):
                there[i] = self._tier.put(names[i], transfer.tokens[i], payload)
        return _leading(there)

    def _load(self, transfer: Transfer) -> int:
        most = min(len(transfer.blocks), _BLOCKS_AT_ONCE)
        data = np.empty((most, self._tier.block_bytes), np.uint8)
        for first in range(0, len(transfer.blocks), _BLOCKS_AT_ONCE):
            part = range(first, min(first + _BLOCKS_AT_ONCE, len(transfer.blocks)))
            found = [
                self._tier.get(BlockName(transfer.names[i]), transfer.tokens[i], data[i - first])
                for i in part
            ]
            count = _leading(found)
            if count:
                self._payloads.write(transfer.blocks[first : first + count], data[:count])
            if count < len(part):
                return first + count
        return len(transfer.blocks)


def _leading(flags: list[bool]) -> int:
    return flags.index(False) if False in flags else len(flags)
