"""What a place below the device is: blocks by name, one contiguous piece each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagedkv.tiers.names import BlockName

UInt8 = npt.NDArray[np.uint8]


@dataclass(slots=True)
class TierStats:
    """Counts since the tier was opened, by this process."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    refused: int = 0  # not stored: the tier is off or closed
    damaged: int = 0  # found, and not what was stored: dropped


def check_payload(data: UInt8, block_bytes: int) -> None:
    """ValueError unless `data` is uint8 [block_bytes]."""
    if data.dtype != np.uint8 or data.shape != (block_bytes,):
        raise ValueError(f"a payload is uint8 [{block_bytes}], got {data.dtype} {data.shape}")


class Below(Protocol):
    """What a scheduler sees of the tiers."""

    def contains(self, names: Sequence[BlockName]) -> list[bool]:
        """For each name whether it may be found. A promise of nothing: others evict too."""
        ...


class Tier(Below, Protocol):
    """A bounded store of blocks, the least recently used of which go first.

    A payload is uint8 [block_bytes], all layers of a block in the canonical layout. Nothing here
    raises for what disk or memory do: a block that cannot be stored or read is a miss. ValueError
    for a payload or an `out` that is not uint8 [block_bytes].
    """

    block_bytes: int
    stats: TierStats

    @property
    def off(self) -> str | None:
        """Why the tier, or one below it, is not used any more; None while all are."""
        ...

    def get(self, name: BlockName, tokens: bytes, out: UInt8) -> bool:
        """Copies a block's payload to `out` (uint8 [block_bytes], the caller's).

        False, and `out` undefined, if there is none, or it is of other tokens.
        """
        ...

    def put(self, name: BlockName, tokens: bytes, data: UInt8) -> bool:
        """Stores a copy of a payload under a name. False if it could not be stored.

        A name that is there already keeps its payload, and counts as just used.
        """
        ...

    def num_blocks(self) -> int:
        """Blocks that it holds now, other processes' included."""
        ...

    def close(self) -> None:
        """Releases what it holds open. May be called twice."""
        ...
