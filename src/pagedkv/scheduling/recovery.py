"""What preempting a request would cost, and how it is best brought back."""

from __future__ import annotations

import math
from typing import NamedTuple

from pagedkv.scheduling.cost import CostModel

RECOMPUTE, SWAP = "recompute", "swap"


class Holding(NamedTuple):
    """What a request would give up by closing its sequences.

        [0, tokens - lost_tokens)       found on the device again, by name or with another holder
        [tokens - lost_tokens, tokens)  gone, with `blocks` blocks

    stored: of those blocks, the ones that a lower tier has a copy of.
    """

    tokens: int
    lost_tokens: int
    blocks: int
    stored: int = 0


class Recovery(NamedTuple):
    """How a victim comes back.

    loss: seconds, or tokens to compute again while the cost model is not fitted. options: what the
    loss is predicted to be for each way there is (a link that was never used: 0.0).
    """

    kind: str
    loss: float
    blocks: int
    options: dict[str, float]

    @property
    def loss_per_block(self) -> float:
        """Infinite where nothing is released."""
        return self.loss / self.blocks if self.blocks else math.inf


def holding(
    tokens: int, exclusive_blocks: int, needed: int, block_size: int, keeps: bool
) -> Holding:
    """What a request of `tokens` computed tokens gives up when `needed` >= 1 blocks are short.

    exclusive_blocks: those that nobody else holds: the last ones of its table. keeps: closed blocks
    stay findable, and are reused tail first and after all that were closed before. Then only as
    many as are needed are lost, and closing a request whole costs as much as dropping its tail.
    """
    blocks = min(exclusive_blocks, needed) if keeps else exclusive_blocks
    kept = (-(-tokens // block_size) - blocks) * block_size
    return Holding(tokens, tokens - max(0, min(tokens, kept)), blocks)


def recover(holding: Holding, cost: CostModel, block_bytes: int | None = None) -> Recovery:
    """The way back of the least predicted seconds; recomputing where both are equal.

    block_bytes: of one block, which is one piece of a transfer, if there is a tier below the
    device. A link that was never used is tried, for nothing else can measure it.
    """
    if not cost.fitted:
        options = {RECOMPUTE: float(holding.lost_tokens)}
        kind = RECOMPUTE if block_bytes is None else SWAP
        return Recovery(kind, options[RECOMPUTE], holding.blocks, options)
    prior = holding.tokens - holding.lost_tokens
    options = {RECOMPUTE: cost.recompute_seconds(holding.lost_tokens, prior)}
    if block_bytes is not None:
        out = max(0, holding.blocks - holding.stored)
        options[SWAP] = cost.swap_seconds(
            out * block_bytes, out, holding.blocks * block_bytes, holding.blocks
        )
    kind = min(options, key=lambda way: options[way])
    return Recovery(kind, options[kind], holding.blocks, options)
