"""What a request takes, noted at the few moments at which it is about to change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedkv.cache import BlockManager
from pagedkv.scheduling.batch import Row
from pagedkv.scheduling.messages import RequestUsage
from pagedkv.scheduling.request import Request


def note_blocks(manager: BlockManager, request: Request) -> None:
    """Notes the blocks that a request has now: before it gives any of them up.

    Between two such moments it only gains blocks.
    """
    tables = [manager.block_table(branch.seq) for branch in request.branches]
    if len(tables) == 1:
        count = len(tables[0])
    else:
        count = len(np.unique(np.concatenate(tables))) if tables else 0
    request.blocks_peak = max(request.blocks_peak, count)


def note_merging(manager: BlockManager, rows: Sequence[Row]) -> None:
    """Before a commit: a block that a sample fills may turn out to be that of its neighbour."""
    size, noted = manager.block_size, None
    for row in rows:
        request = row.branch.request
        if len(request.branches) == 1 or request is noted:
            continue
        if row.start % size + row.count >= size:
            note_blocks(manager, request)
            noted = request


def note_computed(request: Request) -> None:
    """Before a preemption: how far the K/V of each sample go."""
    for branch in request.branches:
        for output in branch.members:
            output.computed = max(output.computed, branch.computed)


def recomputed_tokens(row: Row) -> int:
    """Tokens of a row whose K/V had been there before the last preemption."""
    had = max((output.computed for output in row.branch.members), default=0)
    return max(0, min(row.start + row.count, had) - row.start)


def usage_of(request: Request) -> RequestUsage:
    return RequestUsage(
        cached_tokens=request.num_cached_tokens,
        blocks_peak=request.blocks_peak,
        preemptions=request.num_preemptions,
        swapped_blocks=request.swapped_blocks,
        recomputed_tokens=request.recomputed_tokens,
    )
