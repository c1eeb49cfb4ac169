"""What preempting a request would cost, and how it is best brought back."""

from __future__ import annotations

import math
from typing import NamedTuple

from pagedkv.scheduling.cost import CostModel

RECOMPUTE, PARTIAL_DROP, SWAP = "recompute", "partial_drop", "swap"
# Requests over which `Reuse` takes its mean.
MEMORY = 16


class Holding(NamedTuple):
    """What a running request has.

    tokens: those computed. blocks: those that nobody else holds, the last of its table. stored: how
    many of these a tier below the device has a copy of. keeps: whether closed blocks stay findable;
    they are reused tail first, so that the request finds the others again.
    """

    tokens: int
    blocks: int
    stored: int = 0
    keeps: bool = False

    def lost_tokens(self, blocks: int, block_size: int) -> int:
        """Tokens in the last `blocks` blocks."""
        kept = (-(-self.tokens // block_size) - blocks) * block_size
        return self.tokens - max(0, min(self.tokens, kept))


class Recovery(NamedTuple):
    """How a victim comes back, and what it gives up.

    loss: seconds, or tokens to compute again while the cost model is not fitted. options: the loss
    of each way there is (of a link that was never used: 0.0).
    """

    kind: str
    loss: float
    blocks: int
    options: dict[str, float]

    @property
    def loss_per_block(self) -> float:
        """Infinite where nothing is released."""
        return self.loss / self.blocks if self.blocks else math.inf


class Reuse:
    """Blocks of preempted requests that others had taken when they came back.

    They take more than the shortage that made them yield, for all that run go on growing.
    mean: over some MEMORY requests. One that finds nothing tells only that at least so many go.
    """

    def __init__(self) -> None:
        self.mean = 0.0
        self._seen = 0

    def observe(self, gone: int, held: int) -> None:
        """A request that held `held` blocks comes back and misses the last `gone` of them."""
        number = max(float(gone), self.mean) if gone == held else float(gone)
        self._seen = min(self._seen + 1, MEMORY)
        self.mean += (number - self.mean) / self._seen


def recover(
    holding: Holding,
    needed: int,
    block_size: int,
    cost: CostModel,
    block_bytes: int | None = None,
    mode: str = "auto",
) -> Recovery:
    """The way back of the least predicted seconds; the simpler one where two are equal.

        recompute     all that it holds alone is computed again
        partial_drop  only the `needed` >= 1 tail blocks are, where others stay findable
        swap          what would be computed again is copied out and back in

    block_bytes: of one block, which is one piece of a transfer, if there is a tier below the
    device. A link that was never used is tried, for nothing else can measure it.
    mode: "swap" or "recompute" leave the other out, see `SchedulerConfig.recovery`.
    """
    given = {RECOMPUTE: holding.blocks}
    tail = min(holding.blocks, needed) if holding.keeps else holding.blocks
    if tail < holding.blocks:
        given[PARTIAL_DROP] = tail
    options = {}
    for way, blocks in given.items():
        lost = holding.lost_tokens(blocks, block_size)
        again = cost.recompute_seconds(lost, holding.tokens - lost)
        options[way] = again if cost.fitted else float(lost)
    if block_bytes is not None and mode != RECOMPUTE:
        given[SWAP] = tail
        out = max(0, tail - holding.stored)
        options[SWAP] = (
            cost.swap_seconds(out * block_bytes, out, tail * block_bytes, tail)
            if cost.fitted
            else 0.0
        )
    ways = [SWAP] if mode == SWAP and SWAP in options else list(options)
    kind = min(ways, key=lambda way: options[way])
    return Recovery(kind, options[kind], given[kind], options)
