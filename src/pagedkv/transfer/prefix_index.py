"""Which worker has how much of a prompt, as far as the workers have told.

For each block name a bit mask of the workers that have it. A prompt is followed from its first
block as long as anybody has the next, so a look-up costs what is found, and one mask serves all
workers at once. What is remembered is used for routing only: a worker looks its own cache up, and
compares tokens there.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pagedkv.cache.types import Int64
from pagedkv.transfer.events import AllBlocksCleared, BlockHash, BlockStored, KVEventBatch


class WorkerPrefixes:
    """The blocks of each worker, by the events it sends. Workers are numbers from 0.

    blocks_a_worker: names that are remembered of each; those past it are not (`dropped` counts
        them), and a prompt then seems to have less cached than it has.

    Memory: a mask and a set entry for each name of each worker, about 250 bytes for one that only
    one worker has.
    """

    def __init__(self, blocks_a_worker: int = 1_000_000) -> None:
        if blocks_a_worker < 1:
            raise ValueError(f"blocks_a_worker={blocks_a_worker}: give at least 1")
        self._limit = blocks_a_worker
        self._masks: dict[BlockHash, int] = {}
        self._names: dict[int, set[BlockHash]] = {}
        self._next_seq: dict[int, int] = {}  # of workers whose events have no gap so far
        self.dropped = 0

    def __len__(self) -> int:
        """Different names that are known."""
        return len(self._masks)

    def num_blocks(self, worker: int) -> int:
        """Names that are known of a worker."""
        return len(self._names.get(worker, ()))

    def follows(self, worker: int) -> bool:
        """Whether all that a worker has told since its last picture has arrived."""
        return worker in self._next_seq

    def apply(self, worker: int, seq: int, batch: KVEventBatch) -> bool:
        """Takes a batch of a worker's events. False: events are missing, ask it for a picture.

        A batch that has been taken before changes nothing. After a gap the worker is forgotten and
        its batches are not taken until one begins with `AllBlocksCleared`.
        """
        picture = bool(batch.events) and isinstance(batch.events[0], AllBlocksCleared)
        expected = self._next_seq.get(worker)
        if expected is not None and seq < expected:
            return True  # late or again
        if expected != seq and not picture:
            self.forget(worker)
            return False
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.store(worker, event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self.forget(worker)
            else:
                self.remove(worker, event.block_hashes)
        self._next_seq[worker] = seq + 1
        return True

    def store(self, worker: int, names: Iterable[BlockHash]) -> None:
        """The worker has these blocks."""
        own, masks, bit = self._names.setdefault(worker, set()), self._masks, 1 << worker
        for name in names:
            if len(own) >= self._limit and name not in own:
                self.dropped += 1
                continue
            own.add(name)
            masks[name] = masks.get(name, 0) | bit

    def remove(self, worker: int, names: Iterable[BlockHash]) -> None:
        """The worker has them no longer; unknown ones are ignored."""
        own = self._names.get(worker, set())
        for name in names:
            if name in own:
                own.remove(name)
                self._clear_bit(name, 1 << worker)

    def forget(self, worker: int) -> None:
        """Nothing is known of the worker any more: it has died, restarted, or events were lost."""
        for name in self._names.pop(worker, ()):
            self._clear_bit(name, 1 << worker)
        self._next_seq.pop(worker, None)

    def _clear_bit(self, name: BlockHash, bit: int) -> None:
        left = self._masks[name] & ~bit
        if left:
            self._masks[name] = left
        else:
            del self._masks[name]

    def cached_blocks(self, names: Iterable[BlockHash], num_workers: int) -> Int64:
        """Leading blocks of a prompt that each worker has, int64 [num_workers].

        names: of the prompt's full blocks in order; no more are taken than are found, and one.
        """
        blocks = np.zeros(num_workers, np.int64)
        masks, width = self._masks, -(-num_workers // 8)
        have, depth = (1 << num_workers) - 1, 0  # who has all blocks so far, and how many
        ends: list[int] = []
        ending = bytearray()  # for each of `ends`, who has just so many blocks
        for name in names:
            still = have & masks.get(name, 0)
            if still != have:
                ends.append(depth)
                ending += (have ^ still).to_bytes(width, "little")
                have = still
                if not have:
                    break
            depth += 1
        if have:
            ends.append(depth)
            ending += have.to_bytes(width, "little")
        if ends:
            bits = np.unpackbits(np.frombuffer(ending, np.uint8), bitorder="little")
            # Flat and as bool: ten times as fast as by rows, and there may be hundreds.
            which, workers = np.divmod(bits.view(np.bool_).nonzero()[0], 8 * width)
            blocks[workers] = np.array(ends)[which]
        return blocks
