"""The memory manager: who holds which block. Needs numpy only."""

from pagedkv.cache.errors import InvariantError, OutOfBlocks, OutOfSequences

__all__ = ["InvariantError", "OutOfBlocks", "OutOfSequences"]
