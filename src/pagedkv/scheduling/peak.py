"""The most blocks that sequences take at once until the last of them has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Growth(NamedTuple):
    """A sequence that takes one more token in every step until it ends.

    After t <= remaining steps it takes offset + ceil((tokens + t) / block size) blocks. offset:
    less than 0 by the blocks that are counted with a sequence that ends no earlier.
    """

    tokens: int
    remaining: int
    offset: int = 0


def peak_blocks(sequences: Sequence[Growth], block_size: int) -> int:
    """Blocks at the worst moment; 0 for no sequences.

    Until one ends all only grow, so it is enough to look at the last step of each. With the
    sequences sorted by `remaining`, longest first, the first k are there at the last step of the
    k-th, each grown by its `remaining` (LightLLM's admission test, also that of S-LoRA and of the
    VTC artifact; there in tokens, here in blocks). O(n log n + n * block size).
    """
    if not sequences:
        return 0
    table = np.array(sequences, np.int64)
    tokens, remaining, offset = table[np.argsort(-table[:, 1], kind="stable")].T
    full, filled = np.divmod(tokens, block_size)
    # How many of the first k have so many tokens in their last block, [k, block size].
    alike = np.cumsum(filled[:, None] == np.arange(block_size), axis=0)
    grown = -(-(np.arange(block_size) + remaining[:, None]) // block_size)
    return int((np.cumsum(full + offset) + (alike * grown).sum(axis=1)).max())
