"""Giving names to blocks whose content is known to be there, and taking names away."""

from __future__ import annotations

import numpy as np

from pagedkv.cache.index import ROOT, token_bytes
from pagedkv.cache.state import State
from pagedkv.cache.table import repeat_ranges
from pagedkv.cache.types import Int32, Int64


def publish_full(state: State, which: Int64, firsts: Int64, lasts: Int64) -> None:
    """Names the blocks [first, last) of each row, which have just become full.

    A row whose block before `first` has no name publishes nothing. Where a name exists already,
    the table entry moves to the block that has it and the own copy is let go.
    """
    table, index = state.table, state.index
    owner, place = repeat_ranges(lasts - firsts)
    rows, at = which[owner], firsts[owner] + place
    blocks = table.blocks[rows, at]
    before = np.where(at > 0, table.blocks[rows, at - 1], ROOT)
    named = np.where(
        before == ROOT, ~table.outdated[rows], state.pool.extents[before] == state.block_size
    )
    public = at < table.public[rows] // state.block_size
    contents, size = token_bytes(state.contents[blocks].reshape(-1)), 4 * state.block_size
    recall = state.pool.eviction.recall
    published: list[int] = []
    again: list[int] = []  # places of blocks whose names were evicted lately
    moved: list[tuple[int, int]] = []  # (place in the arrays above, block that has the name)
    parent = ROOT
    columns = (rows, blocks, place, before, named, public)
    each = zip(*(column.tolist() for column in columns), strict=True)
    for i, (row, block, nth, before_first, is_named, is_public) in enumerate(each):
        if nth == 0:
            parent, follows = before_first, is_named
        if not follows:
            continue
        frame = table.frames[row][0 if is_public else 1]
        tokens = contents[i * size : (i + 1) * size]
        owner_of_name = index.publish(block, parent, frame, tokens)
        if owner_of_name == block:
            published.append(block)
            if recall(index.digests[block]):
                again.append(i)
        else:
            moved.append((i, owner_of_name))
        parent = owner_of_name
    state.pool.name(np.array(published, np.int32), state.block_size)
    if index.log is not None:
        index.log.publish(published, state.block_size)
    if moved:
        places, known_blocks = np.array(moved, np.int32).T
        state.pool.change(known_blocks, +1)
        table.write(rows[places], at[places], known_blocks)
        state.pool.change(blocks[places], -1)
    for i in again:
        state.pool.use_again(table.blocks[rows[i], : at[i] + 1])


def publish_tail(state: State, row: int) -> None:
    rows, pool = state.table, state.pool
    at, fill = divmod(int(rows.lengths[row]), state.block_size)
    if not fill:
        return
    block = int(rows.blocks[row, at])
    parent = int(rows.blocks[row, at - 1]) if at else ROOT
    if pool.counts[block] > 1 or pool.extents[block]:
        return
    if rows.outdated[row] if parent == ROOT else pool.extents[parent] != state.block_size:
        return
    frames = rows.frames[row]
    frame = frames.public if at < int(rows.public[row]) // state.block_size else frames.private
    tokens = token_bytes(state.contents[block, :fill])
    if state.index.publish(block, parent, frame, tokens) == block:
        pool.name(np.array([block], np.int32), fill)
        if state.index.log is not None:
            state.index.log.publish([block], fill)
        if pool.eviction.recall(state.index.digests[block]):
            pool.use_again(rows.blocks[row, : at + 1])


def withdraw(state: State, blocks: list[int]) -> None:
    """Withdraws names with all their descendants'; cached blocks among them become free."""
    gone: list[int] = []
    for block in blocks:
        if state.index.keys[block]:  # not already withdrawn with an ancestor
            gone += state.index.withdraw(block)
    if gone:
        state.pool.unname(np.array(gone, np.int32))


def withdraw_all(state: State) -> None:
    """Withdraws every name; a log hears of it as one event."""
    index = state.index
    log, index.log = index.log, None
    withdraw(state, [b for b, p in enumerate(index.parents) if p == ROOT and index.keys[b]])
    index.log = log
    if log is not None:
        log.clear()


def evict(state: State, k: int) -> Int32:
    if k <= 0:
        return np.zeros(0, np.int32)
    oldest = state.pool.take_oldest(k)
    digests = state.index.digests
    state.pool.eviction.remember([digests[block] for block in oldest.tolist()])
    withdraw(state, oldest.tolist())
    return oldest
