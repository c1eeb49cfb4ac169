"""Waiting requests whose beginning another request computes in the step that is being planned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedkv.cache import BlockManager
from pagedkv.scheduling.batch import Row
from pagedkv.scheduling.request import Branch, Request
from pagedkv.scheduling.step import Int32

# Steps that a request may wait for others to compute the beginning of its prompt.
MAX_PASSINGS = 8


def may_wait(request: Request, spare: float) -> bool:
    """Whether a request may be passed over once more, for another computes part of it.

    spare: seconds that it can wait without its first token being late.
    """
    return request.num_passings < MAX_PASSINGS and spare > 0


class Leaders:
    """The rows of a step that fill blocks, which have names when it is committed.

    They are kept by the first block that each fills, so that a waiting request is compared only
    with rows that fill a block it has too: a look-up a place where rows begin to fill, and one
    comparison of arrays for each row found. A row that is planned later is added with `add`.
    """

    def __init__(self, manager: BlockManager, rows: Sequence[Row]) -> None:
        self._manager = manager
        self._size = manager.block_size
        # By place and tokens of the first block that they fill.
        self._rows: dict[int, dict[bytes, list[Row]]] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        first, branch = row.start // self._size, row.branch
        if first == (row.start + row.count) // self._size:
            return
        tokens = branch.tokens(first * self._size, (first + 1) * self._size)
        block = np.array(tokens, np.int32).tobytes()
        self._rows.setdefault(first, {}).setdefault(block, []).append(row)

    def hit_after(self, request: Request, lookup: Int32, cached: int) -> int:
        """Tokens of `lookup` that the cache will have after the step thanks to one of the rows.

        0 unless they are more than the `cached` tokens that it has now.
        """
        alike = 0
        for first, rows in self._rows.items():
            # Blocks before the row's first are named already: `request` hits them now, or they
            # are not its own.
            if first > cached // self._size or (first + 1) * self._size > len(lookup):
                continue
            tokens = lookup[first * self._size : (first + 1) * self._size]
            for row in rows.get(tokens.tobytes(), ()):
                if self._manager.publishes(row.branch.seq):
                    alike = max(alike, self._blocks_alike(row, request, lookup))
        hit = min(alike * self._size, len(lookup) - 1)
        return hit if hit > cached else 0

    def _blocks_alike(self, row: Row, request: Request, lookup: Int32) -> int:
        """Leading blocks, full after the step, that have the names of those of `lookup`."""
        size, leader = self._size, row.branch.request
        count = min(row.start + row.count, len(lookup)) // size * size
        same = _leading(row.branch, count) == lookup[:count]
        alike = (count if same.all() else int(same.argmin())) // size
        mine, theirs = request.public // size, leader.public // size
        if mine != theirs or request.namespace != leader.namespace:
            # Where one has a private block, or both have, the names differ.
            alike = min(alike, mine, theirs)
        return alike


def _leading(branch: Branch, count: int) -> Int32:
    """The first `count` known tokens."""
    prompt = branch.request.prompt
    if count <= len(prompt):
        return prompt[:count]
    return np.concatenate([prompt, np.array(branch.tokens(len(prompt), count), np.int32)])
