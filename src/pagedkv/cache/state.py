"""What the verbs work on: pool, block table, names and contents, kept together."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.cache.index import PrefixIndex
from pagedkv.cache.pool import Pool
from pagedkv.cache.table import BlockTable
from pagedkv.cache.types import Int32


@dataclass(frozen=True, slots=True)
class State:
    """`contents` int32 [num_blocks + 1, B]: the tokens whose K/V stands in each slot."""

    block_size: int
    prefix_caching: bool
    pool: Pool
    table: BlockTable
    index: PrefixIndex
    contents: Int32
