"""The memory manager: who holds which block. Needs numpy only."""

from pagedkv.cache.errors import (
    EventGap,
    InvariantError,
    Misuse,
    OutOfBlocks,
    OutOfSequences,
    SanitizerError,
)
from pagedkv.cache.events import EventLog
from pagedkv.cache.lease import Lease
from pagedkv.cache.manager import BlockManager
from pagedkv.cache.types import BlockId, Imported, Match, Reservation, SeqId

__all__ = [
    "BlockId",
    "BlockManager",
    "EventGap",
    "EventLog",
    "Imported",
    "InvariantError",
    "Lease",
    "Match",
    "Misuse",
    "OutOfBlocks",
    "OutOfSequences",
    "Reservation",
    "SanitizerError",
    "SeqId",
]
