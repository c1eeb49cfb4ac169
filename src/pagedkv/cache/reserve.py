"""Reservations: checking them, carrying out their write plan, and undoing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from pagedkv.cache.state import State
from pagedkv.cache.table import NO_RESERVATION, BlockTable, int_array, repeat_ranges
from pagedkv.cache.types import NULL_BLOCK, Int32, Int64, Reservation
from pagedkv.cache.writes import WritePlan


def read_counts(table: BlockTable, which: Int64, counts: Sequence[int] | Int64) -> Int64:
    """Tokens to reserve for each row, int64 [n]. ValueError if a row cannot reserve them."""
    wanted = int_array(counts, "counts")
    if wanted.shape != which.shape:
        raise ValueError(f"{len(wanted)} counts for {len(which)} sequences")
    if np.count_nonzero(wanted < 0):
        raise ValueError(f"cannot reserve {wanted[wanted < 0][0]} tokens: give at least 0")
    busy = table.reserved[which] != NO_RESERVATION
    if np.count_nonzero(busy):
        raise ValueError(
            f"sequence {table.seqs[which[busy][0]]} has an open reservation: "
            "commit or cancel it first"
        )
    longest = table.width * table.block_size
    over = wanted > longest - table.lengths[which]  # a sum could pass int64
    if np.count_nonzero(over):
        row = which[over][0]
        raise ValueError(
            f"sequence {table.seqs[row]}: {table.lengths[row]} + {wanted[over][0]} tokens pass "
            f"max_blocks_per_seq={table.width} ({longest} tokens)"
        )
    return wanted


def refuse_commit(table: BlockTable, which: Int64, counts: Int64) -> NoReturn:
    """Says which row was to commit more tokens than it has reserved."""
    place = int(np.flatnonzero(table.reserved[which] < counts)[0])
    seq, reserved = table.seqs[which[place]], table.reserved[which[place]]
    if reserved == NO_RESERVATION:
        raise ValueError(f"sequence {seq} has no open reservation to commit")
    raise ValueError(f"sequence {seq}: {counts[place]} tokens committed, {reserved} were reserved")


def apply(state: State, plan: WritePlan, blocks: Int32) -> Reservation:
    """Puts new blocks into the rows: in call order, a row's copy before its fresh blocks."""
    rows, which = state.table, plan.rows
    copying = plan.copies.nonzero()[0]
    copies = np.zeros((len(copying), 3), np.int32)
    if len(copying):
        taken = plan.fresh + plan.copies
        of_copies = (np.cumsum(taken) - taken)[copying]
        at = which[copying], plan.owned[copying] - 1
        copies[:, 0] = rows.copy_sources[at[0]] = rows.blocks[at]
        copies[:, 1] = blocks[of_copies]
        rows.write(*at, copies[:, 1])
        copies[:, 2] = plan.starts[copying] % state.block_size
        state.contents[copies[:, 1]] = state.contents[copies[:, 0]]
        blocks = np.delete(blocks, of_copies)
    if len(blocks):
        growing = plan.fresh.nonzero()[0]
        owner, place = repeat_ranges(plan.fresh[growing])
        owner = growing[owner]
        rows.write(which[owner], plan.owned[owner] + place, blocks)
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
    if len(copying):
        at = copying, rows.lengths[copying] // state.block_size
        copies = rows.blocks[at]
        rows.write(*at, rows.copy_sources[copying])
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
    if not np.count_nonzero(surplus):
        return
    owner, place = repeat_ranges(surplus)
    at = which[owner], (have[owner] - 1 - place)
    blocks = state.table.blocks[at]
    state.table.write(*at, NULL_BLOCK)
    state.pool.change(blocks, -1)
