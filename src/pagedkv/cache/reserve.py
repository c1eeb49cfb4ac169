"""Carrying out a write plan, and undoing it: the table entries and counts of reservations."""

from __future__ import annotations

import numpy as np

from pagedkv.cache.state import State
from pagedkv.cache.table import NO_RESERVATION, repeat_ranges
from pagedkv.cache.types import Int32, Int64, Reservation
from pagedkv.cache.writes import WritePlan


def apply(state: State, plan: WritePlan, blocks: Int32) -> Reservation:
    """Puts new blocks into the rows: in call order, a row's copy before its fresh blocks."""
    rows, which = state.table, plan.rows
    copying = np.flatnonzero(plan.copies)
    copies = np.zeros((len(copying), 3), np.int32)
    if len(copying):
        taken = plan.fresh + plan.copies
        of_copies = (np.cumsum(taken) - taken)[copying]
        at = which[copying], plan.owned[copying] - 1
        copies[:, 0] = rows.copy_sources[at[0]] = rows.blocks[at]
        copies[:, 1] = rows.blocks[at] = blocks[of_copies]
        copies[:, 2] = plan.starts[copying] % state.block_size
        state.contents[copies[:, 1]] = state.contents[copies[:, 0]]
        blocks = np.delete(blocks, of_copies)
    owner, place = repeat_ranges(plan.fresh)
    rows.blocks[which[owner], plan.owned[owner] + place] = blocks
    rows.reserved[which] = plan.counts
    slots = rows.slots(which, plan.starts, plan.counts)
    return Reservation(slots[None], (copies,))


def cancel(state: State, which: Int64) -> None:
    rows = state.table
    starts, reserved = rows.lengths[which], rows.reserved[which]
    drop_entries(
        state, which, -(-starts // state.block_size), -(-(starts + reserved) // state.block_size)
    )
    copying = which[rows.copy_sources[which] != 0]
    at = copying, rows.lengths[copying] // state.block_size
    copies = rows.blocks[at]
    rows.blocks[at] = rows.copy_sources[copying]
    rows.copy_sources[copying] = 0
    state.pool.change(copies, -1)
    rows.reserved[which] = NO_RESERVATION


def end_copies(state: State, which: Int64) -> None:
    sources = state.table.copy_sources[which]
    sources = sources[sources != 0]
    if len(sources):
        state.table.copy_sources[which] = 0
        state.pool.change(sources, -1)


def drop_entries(state: State, which: Int64, keep: Int64, have: Int64) -> None:
    """Releases table entries [keep, have) of each row, tail first."""
    surplus = have - keep
    if not surplus.any():
        return
    owner, place = repeat_ranges(surplus)
    at = which[owner], (have[owner] - 1 - place)
    blocks = state.table.blocks[at]
    state.table.blocks[at] = 0
    state.pool.change(blocks, -1)
