"""The whole manager as bytes, and a canonical key of its state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pagedkv.cache.index import make_frames
from pagedkv.cache.records import blob, name_from_json, name_to_json, pack, unblob, unpack

if TYPE_CHECKING:
    from pagedkv.cache.manager import BlockManager

_MAGIC = b"pkvsnap2"
_POOL_ARRAYS = ("counts", "lease_counts", "extents", "hot", "free", "probation", "protected")
_ROW_ARRAYS = (
    "seqs",
    "lengths",
    "reserved",
    "copy_sources",
    "public",
    "found",
    "outdated",
    "stamps",
)


def pack_manager(m: BlockManager) -> bytes:
    """All that can influence a later result: reservations, copies, leases, eviction order."""
    table, pool, index = m.table, m.pool, m.index
    named = sorted((s, b) for b, s in enumerate(index.serials) if s)
    blocks = [b for _, b in named]
    rows = table.open_rows()
    facts = {
        "num_blocks": m.num_blocks,
        "block_size": m.block_size,
        "prefix_caching": m.prefix_caching,
        "max_seqs": m.max_seqs,
        "max_blocks_per_seq": m.max_blocks_per_seq,
        "sanitize": m.sanitizer is not None,
        "eviction": m.eviction,
        "clock": table.clock,
        "next_seq": table.next_serial,
        "next_node": index.next_serial,
        "next_lease": m.next_lease,
        "leases": {str(i): ids.tolist() for i, ids in m.leases.items()},
        "names": [name_to_json(*table.namespaces[row]) for row in rows.tolist()],
    }
    keys, key_ends = blob([index.keys[b] for b in blocks])
    width = max((table.num_blocks(row) for row in rows.tolist()), default=0)
    arrays: dict[str, Any] = {name: getattr(table, name)[rows] for name in _ROW_ARRAYS}
    arrays |= {
        "rows": rows,
        "table": table.blocks[rows, :width],
        "unused": np.array(table.unused_rows(), np.int64),
        "counts": pool.counts,
        "lease_counts": pool.leases,
        "extents": pool.extents,
        "free": pool.free_stack(),
        "hot": pool.eviction.hot,
        "probation": pool.eviction.probation.order(),
        "protected": pool.eviction.protected.order(),
        "ghosts": np.array(list(pool.eviction.ghosts), np.int64),
        "digests": np.array([index.digests[b] for b in blocks], np.int64),
        "contents": m.contents,
        "named": np.array(blocks, np.int64),
        "parents": np.array([index.parents[b] for b in blocks], np.int64),
        "serials": np.array([s for s, _ in named], np.int64),
        "heirs": np.array(index.heirs, np.int64),
        "keys": keys,
        "key_ends": key_ends,
    }
    return pack(_MAGIC, facts, arrays)


def unpack_manager(cls: type[BlockManager], data: bytes, sanitize: bool | None) -> BlockManager:
    """Inverse of `pack_manager`; `sanitize` None: as it was.

    ValueError for anything but an intact snapshot of this version.
    """
    facts, arrays = unpack(_MAGIC, data)
    m = cls(
        facts["num_blocks"],
        facts["block_size"],
        facts["prefix_caching"],
        facts["max_seqs"],
        facts["max_blocks_per_seq"],
        facts["sanitize"] if sanitize is None else sanitize,
        facts["eviction"],
    )
    table, pool, index = m.table, m.pool, m.index
    rows = arrays["rows"]
    for name in _ROW_ARRAYS:
        getattr(table, name)[rows] = arrays[name]
    for row, name in zip(rows.tolist(), facts["names"], strict=True):
        table.namespaces[row] = name_from_json(name)
        table.frames[row] = make_frames(*table.namespaces[row])
    table.load(rows, arrays["table"], arrays["unused"].tolist(), facts["next_seq"])
    table.clock = facts["clock"]
    m.contents[:] = arrays["contents"]
    pool.load(*(arrays[name] for name in _POOL_ARRAYS))
    pool.eviction.remember(arrays["ghosts"].tolist())
    index.load(
        arrays["named"].tolist(),
        arrays["parents"].tolist(),
        arrays["serials"].tolist(),
        unblob(arrays["keys"], arrays["key_ends"]),
        arrays["heirs"].tolist(),
        arrays["digests"].tolist(),
        facts["next_node"],
    )
    m.leases = {int(i): np.array(ids, np.int32) for i, ids in facts["leases"].items()}
    m.next_lease = facts["next_lease"]
    if m.sanitizer is not None:
        m.sanitizer.restored()
    return m


def state_key(m: BlockManager) -> bytes:
    """Equal for states that behave alike.

    Sequences stand by age; blocks are numbered by first mention in rows, then in eviction order,
    then in leases. Which free block comes next, and all ids and stamps, are left out.
    """
    table, pool, index = m.table, m.pool, m.index
    numbers: dict[int, int] = {0: 0}
    filled: dict[int, int] = {}
    order = pool.eviction.order().tolist()
    rows = table.open_rows().tolist()
    entries = {row: table.blocks[row, : table.num_blocks(row)].tolist() for row in rows}
    for row in rows:
        for i, block in enumerate(entries[row]):
            inside = min(max(int(table.lengths[row]) - i * m.block_size, 0), m.block_size)
            filled[block] = max(filled.get(block, 0), inside)
    sources = [int(table.copy_sources[row]) for row in rows]
    leased = [block for ids in m.leases.values() for block in ids.tolist()]
    for block in [b for row in rows for b in entries[row]] + sources + order + leased:
        numbers.setdefault(block, len(numbers))
    sequences = [
        (
            int(table.lengths[row]),
            int(table.reserved[row]),
            [numbers[b] for b in entries[row]],
            numbers[source],
            int(table.public[row]),
            int(table.found[row]),
            bool(table.outdated[row]),
            table.frames[row],
        )
        for row, source in zip(rows, sources, strict=True)
    ]
    blocks = [
        (
            m.contents[block, : max(filled.get(block, 0), int(pool.extents[block]))].tolist(),
            int(pool.extents[block]),
            bool(pool.eviction.hot[block]) and pool.eviction.resistant,
            numbers[index.parents[block]],
            index.keys[block][8:],
        )
        for block in numbers
        if block
    ]
    leases = [[numbers[b] for b in ids.tolist()] for ids in m.leases.values()]
    memory = len(pool.eviction.protected), list(pool.eviction.ghosts)
    shape = m.num_blocks, m.block_size, m.prefix_caching, m.max_seqs, m.max_blocks_per_seq
    return repr((shape, sequences, blocks, [numbers[b] for b in order], leases, memory)).encode()
