"""Giving names to blocks whose content is known to be there, and taking names away."""

from __future__ import annotations

import numpy as np

from pagedkv.cache.index import ROOT, token_bytes
from pagedkv.cache.state import State
from pagedkv.cache.types import Int32


def publish_full(state: State, row: int, first: int, last: int) -> None:
    """Names the blocks [first, last) of a row, which have just become full."""
    rows, index, pool = state.table, state.index, state.pool
    frames, public_blocks = rows.frames[row], int(rows.public[row]) // state.block_size
    parent = int(rows.blocks[row, first - 1]) if first else ROOT
    if parent != ROOT and pool.extents[parent] != state.block_size:
        return
    contents = token_bytes(state.contents[rows.blocks[row, first:last]].reshape(-1))
    size = 4 * state.block_size
    for i, block in enumerate(rows.blocks[row, first:last].tolist()):
        frame = frames.public if first + i < public_blocks else frames.private
        tokens = contents[i * size : (i + 1) * size]
        known = index.find(parent, frame, tokens)
        if known == ROOT:
            index.publish(block, parent, frame, tokens)
            pool.name(block, state.block_size)
            parent = block
        else:
            pool.change(np.array([known], np.int32), +1)
            rows.blocks[row, first + i] = known
            pool.change(np.array([block], np.int32), -1)
            parent = known


def publish_tail(state: State, row: int) -> None:
    rows, pool = state.table, state.pool
    at, fill = divmod(int(rows.lengths[row]), state.block_size)
    if not fill:
        return
    block = int(rows.blocks[row, at])
    parent = int(rows.blocks[row, at - 1]) if at else ROOT
    if pool.counts[block] > 1 or pool.extents[block]:
        return
    if parent != ROOT and pool.extents[parent] != state.block_size:
        return
    frames = rows.frames[row]
    frame = frames.public if at < int(rows.public[row]) // state.block_size else frames.private
    tokens = token_bytes(state.contents[block, :fill])
    if state.index.find(parent, frame, tokens) == ROOT:
        state.index.publish(block, parent, frame, tokens)
        pool.name(block, fill)


def withdraw(state: State, blocks: list[int]) -> None:
    """Withdraws names with all their descendants'; cached blocks among them become free."""
    gone: list[int] = []
    for block in blocks:
        if state.index.keys[block]:  # not already withdrawn with an ancestor
            gone += state.index.withdraw(block)
    if gone:
        state.pool.unname(np.array(gone, np.int32))


def evict(state: State, k: int) -> Int32:
    if k <= 0:
        return np.zeros(0, np.int32)
    oldest = state.pool.take_oldest(k)
    withdraw(state, oldest.tolist())
    return oldest
