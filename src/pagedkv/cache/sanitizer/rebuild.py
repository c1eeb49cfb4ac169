"""The shadow of a manager that has taken over a saved state, from that state alone.

Who allocated and freed a block, in which namespace a cached one was computed, and what has been
reported of open reservations is not known then; everything else is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pagedkv.cache.index import ROOT
from pagedkv.cache.sanitizer.shadow import NOT_KNOWN, Shadow

if TYPE_CHECKING:
    from pagedkv.cache.manager import BlockManager


def rebuild(shadow: Shadow, manager: BlockManager) -> None:
    """Fills a fresh shadow."""
    table, size = manager.table, manager.block_size
    _take_published(shadow, manager)
    rows = table.open_rows()
    for name in ("seqs", "lengths", "public", "copy_sources"):
        getattr(shadow, name)[rows] = getattr(table, name)[rows]
    shadow.reserved[rows] = np.maximum(table.reserved[rows], 0)
    shadow.written[rows[table.reserved[rows] > 0]] = NOT_KNOWN
    shadow.outdated_rows[rows] = table.outdated[rows]
    for row in rows.tolist():
        namespace, extra = table.namespaces[row]
        shadow.row_spaces[row] = [shadow.space(namespace, extra, p) for p in (True, False)]
        count = table.num_blocks(row)
        shadow.set_entries(np.full(count, row), np.arange(count), table.blocks[row, :count])
        length = shadow.lengths[[row]]
        one, zero = np.array([row]), np.array([0])
        blocks = table.blocks[row, : -(-int(length[0]) // size)]
        tokens = manager.contents[blocks].reshape(-1)[: int(length[0])]
        shadow.fill(one, zero, tokens, length)
        shadow.outdated[blocks] |= shadow.outdated_rows[row]
        if source := int(shadow.copy_sources[row]):
            fill = int(length[0]) % size
            for array in (shadow.tokens, shadow.prints):
                array[source, :fill] = array[blocks[-1], :fill]
            shadow.filled[source] = max(int(shadow.filled[source]), fill)
            shadow.outdated[source] |= shadow.outdated_rows[row]
    np.add.at(shadow.references, shadow.copy_sources[shadow.copy_sources > 0], 1)
    shadow.leases[:] = manager.pool.leases


def _take_published(shadow: Shadow, manager: BlockManager) -> None:
    """Fingerprints of the published slots, parents before children."""
    index, extents = manager.index, manager.pool.extents
    named = sorted(np.flatnonzero(extents).tolist(), key=lambda block: index.serials[block])
    for block in named:
        parent, extent = index.parents[block], int(extents[block])
        before = shadow.prints[[parent], -1] if parent != ROOT else np.zeros(1, np.uint64)
        tokens = manager.contents[block, :extent]
        shadow.tokens[block, :extent] = tokens
        shadow.prints[block, :extent] = shadow.chain(before, tokens, np.array([extent]))
        shadow.filled[block] = extent
