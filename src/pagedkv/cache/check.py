"""Every invariant of the cache, recomputed from scratch and compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pagedkv.cache.errors import InvariantError
from pagedkv.cache.index import ROOT, token_bytes
from pagedkv.cache.table import NO_RESERVATION

if TYPE_CHECKING:
    from pagedkv.cache.manager import BlockManager


def _require(ok: object, message: str) -> None:
    if not ok:
        raise InvariantError(message)


def check_manager(m: BlockManager) -> None:
    """Raises InvariantError naming what differs, with the block or sequence."""
    _check_rows(m)
    _check_counts(m)
    _check_states(m)
    _check_names(m)
    _check_holders_of_names(m)


def _check_rows(m: BlockManager) -> None:
    table = m.table
    rows = table.open_rows()
    used = sorted(rows.tolist() + table.unused_rows())
    _require(used == list(range(m.max_seqs)), "each row is either open or unused")
    closed = np.array(table.unused_rows(), np.int64)
    _require(not table.blocks[closed].any(), "a row that is not in use has table entries")
    _require((table.reserved[closed] == NO_RESERVATION).all(), "an unused row has a reservation")
    _require(not table.copy_sources[closed].any(), "an unused row has a pending copy")
    for row in rows.tolist():
        seq, length = table.seq(row), int(table.lengths[row])
        count = table.num_blocks(row)
        entries = table.blocks[row]
        _require(length >= 0 and count <= table.width, f"sequence {seq}: length {length}")
        _require(
            (entries[:count] > 0).all() and (entries[:count] <= m.num_blocks).all(),
            f"sequence {seq}: table {entries[:count].tolist()} names a block that does not exist",
        )
        _require(not entries[count:].any(), f"sequence {seq}: entries past its {count} blocks")
        _require(
            len(np.unique(entries[:count])) == count,
            f"sequence {seq}: table {entries[:count].tolist()} names a block twice",
        )
        if table.copy_sources[row]:
            _require(
                table.reserved[row] > 0 and length % m.block_size,
                f"sequence {seq}: a copy without a write into a partly filled block",
            )


def _check_counts(m: BlockManager) -> None:
    table, pool = m.table, m.pool
    names = np.concatenate(
        [table.blocks[table.blocks > 0], table.copy_sources[table.copy_sources > 0]]
    )
    counts = np.bincount(names, minlength=m.num_blocks + 1)
    wrong = np.flatnonzero(counts != pool.counts)
    if len(wrong):
        b = int(wrong[0])
        raise InvariantError(f"block {b}: count {pool.counts[b]}, but {counts[b]} holders name it")
    leased = np.zeros(m.num_blocks + 1, np.int64)
    for ids in m.leases.values():
        leased[ids] += 1
    wrong = np.flatnonzero(leased != pool.leases)
    if len(wrong):
        b = int(wrong[0])
        raise InvariantError(f"block {b}: {pool.leases[b]} leases recorded, {leased[b]} are open")


def _check_states(m: BlockManager) -> None:
    pool = m.pool
    held, leased, named = pool.counts > 0, pool.leases > 0, pool.extents > 0
    for array, what in ((held, "count"), (leased, "lease"), (named, "name")):
        _require(not array[0], f"the null block has a {what}")
    draining, cached = ~held & leased, ~held & ~leased & named
    free = ~held & ~leased & ~named
    free[0] = False
    for what, mask, number in (
        ("held", held, pool.num_held),
        ("draining", draining, pool.num_draining),
        ("cached", cached, pool.num_cached),
        ("free", free, pool.num_free),
    ):
        _require(
            int(mask.sum()) == number, f"{number} blocks counted {what}, {int(mask.sum())} are"
        )
    _require(named[pool.eviction.hot].all(), "a block without a name counts as used again")
    for what, mask, listed in (
        ("the free stack", free, pool.free_stack()),
        ("the eviction order", cached, pool.eviction.order()),
    ):
        expected = np.flatnonzero(mask)
        _require(
            np.array_equal(np.sort(listed), expected),
            f"{what} holds {sorted(listed.tolist())}, in that state are {expected.tolist()}",
        )


def _check_names(m: BlockManager) -> None:
    index, extents = m.index, m.pool.extents
    named = [b for b, key in enumerate(index.keys) if key]
    _require(named == np.flatnonzero(extents).tolist(), "named blocks and published extents differ")
    _require(len(index) == len(named), "the index has entries that no block knows")
    heirs = {heir for heir in index.heirs if heir != ROOT}
    _require(
        index.ordered_keys() == sorted(index.keys[b] for b in named if b not in heirs),
        "the ordered keys are stale",
    )
    others = [0] * (m.num_blocks + 1)
    for b in named:
        key, parent = index.keys[b], index.parents[b]
        others[parent] += b not in heirs
        _require(
            parent == ROOT or extents[parent] == m.block_size,
            f"block {b} is published, its parent {parent} is not a published full block",
        )
        _require(
            key[:8] == index.serials[parent].to_bytes(8),
            f"block {b}: its name continues an older content of block {parent}",
        )
        content = token_bytes(m.contents[b, : extents[b]])
        _require(key.endswith(content), f"block {b}: its name is not its content")
        _require(index.node(key) == b, f"block {b}: its name leads to block {index.node(key)}")
    _require(others == index.others.tolist(), "counts of named children are stale")
    for parent, heir in enumerate(index.heirs):
        _require(
            heir == ROOT or (index.parents[heir] == parent and extents[heir] == m.block_size),
            f"block {heir} is followed from {parent}, but is no full child of it",
        )


def _check_holders_of_names(m: BlockManager) -> None:
    table, pool, index = m.table, m.pool, m.index
    for row in table.open_rows().tolist():
        entries = table.blocks[row, : table.num_blocks(row)]
        for i in np.flatnonzero(pool.extents[entries]).tolist():
            block, before = int(entries[i]), int(entries[i - 1]) if i else ROOT
            _require(
                index.parents[block] == before,
                f"sequence {table.seq(row)} holds published block {block} without its parent "
                f"{index.parents[block]}",
            )
            inside = int(table.lengths[row]) - i * m.block_size
            _require(
                table.reserved[row] <= 0 or inside >= m.block_size or inside < 0,
                f"sequence {table.seq(row)} is to write into published block {block}",
            )
    for block in np.flatnonzero(pool.extents).tolist():
        parent = index.parents[block]
        _require(
            parent == ROOT or pool.counts[parent] >= pool.counts[block],
            f"block {block} has more holders than its parent {parent}",
        )
