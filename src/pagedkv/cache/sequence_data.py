"""One sequence as bytes: what a receiver needs to open it by name. The K/V travels separately."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pagedkv.cache.records import name_from_json, name_to_json, pack, unpack
from pagedkv.cache.types import Int32

if TYPE_CHECKING:
    from pagedkv.cache.manager import BlockManager

_MAGIC = b"pkvseq1\n"


class SequenceFacts(NamedTuple):
    """`blocks` are the sender's ids, `block_size` the sender's: they locate its payload."""

    tokens: Int32
    namespace: str | bytes | None
    public: int
    extra: bytes | None
    blocks: Int32
    block_size: int


def pack_sequence(manager: BlockManager, row: int) -> bytes:
    table = manager.table
    blocks = table.blocks[row, : table.num_blocks(row)]
    tokens = manager.contents[blocks].reshape(-1)[: table.lengths[row]]
    facts = {
        "block_size": manager.block_size,
        "public": int(table.public[row]),
        "name": name_to_json(*table.namespaces[row]),
    }
    return pack(_MAGIC, facts, {"tokens": tokens, "blocks": blocks})


def unpack_sequence(data: bytes) -> SequenceFacts:
    """ValueError for anything but an intact export of this version."""
    facts, arrays = unpack(_MAGIC, data)
    namespace, extra = name_from_json(facts["name"])
    return SequenceFacts(
        arrays["tokens"], namespace, facts["public"], extra, arrays["blocks"], facts["block_size"]
    )
