"""The arithmetic of a paged pool: what a model's K/V take, how many sequences fit, what is wasted.

Also when copying K/V over a link beats computing them anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagedkv.errors import ConfigError

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1, "int8": 1}


def _check(name: str, value: float, limit: float) -> None:
    if not 1 <= value < limit:
        raise ConfigError(f"{name}={value}: give at least 1 and less than {limit}")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the size of a model's K/V depends on."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str  # of K and V

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim"):
            _check(name, getattr(self, name), 2**31)
        if self.dtype not in BYTES:
            raise ConfigError(f"dtype={self.dtype!r}: use one of {', '.join(BYTES)}")

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Capacity:
    """A pool of `memory` bytes, against one reservation of `reserve` tokens a request."""

    shape: ModelShape
    memory: int
    block_size: int
    reserve: int  # tokens that a contiguous allocator sets aside
    mean_tokens: int  # tokens that a sequence holds on average

    def __post_init__(self) -> None:
        for name in ("memory", "block_size", "reserve", "mean_tokens"):
            _check(name, getattr(self, name), 2**63)
        if self.mean_tokens > self.reserve:
            raise ConfigError(
                f"mean_tokens={self.mean_tokens} pass the reservation of {self.reserve}: no "
                "sequence may outgrow what is set aside for it"
            )
        if self.num_blocks < 1:
            raise ConfigError(
                f"memory={self.memory} bytes hold no block of {self.block_size} tokens of "
                f"{self.shape.token_bytes} bytes: give more, or a smaller block size"
            )

    @property
    def num_blocks(self) -> int:
        return self.memory // (self.block_size * self.shape.token_bytes)

    @property
    def reservation_bytes(self) -> int:
        return self.reserve * self.shape.token_bytes

    @property
    def resident_reserved(self) -> int:
        """Sequences that fit when each reserves the maximum."""
        return self.memory // self.reservation_bytes

    @property
    def resident_paged(self) -> int:
        """Sequences of the mean length that fit when each holds whole blocks."""
        return self.num_blocks // -(-self.mean_tokens // self.block_size)

    def tail_waste(self, block_size: int) -> float:
        """Share of held slots without a token: on average (B - 1) / 2 empty slots a sequence."""
        empty = (block_size - 1) / 2
        return empty / (self.mean_tokens + empty)

    @property
    def reserved_waste(self) -> float:
        return 1 - self.mean_tokens / self.reserve


@dataclass(frozen=True, slots=True)
class Recovery:
    """A preempted sequence's K/V copied back over a link, or computed anew.

    Copying n tokens takes x * (n * token_bytes / link + pieces * piece_seconds): x = 2 when both
    ways are waited for, 1 when the way out was not; a piece is contiguous memory, and many small
    ones are what makes swapping slow. A prefill of n tokens takes
    n * (2 * parameters + 2 * layers * width * n) / flops, width = query heads * head_dim: the
    matrices, and causal attention at half the full square.
    """

    shape: ModelShape
    parameters: float
    attention_width: int
    flops: float  # per second, as reached in a prefill
    link: float  # bytes per second, as reached
    ways: int = 1
    piece_bytes: float = float(2**63)  # all in one piece
    piece_seconds: float = 0.0  # a piece, whatever its size

    def __post_init__(self) -> None:
        for name in ("parameters", "attention_width", "flops", "link", "piece_bytes"):
            _check(name, getattr(self, name), 1e30)
        if not 0 <= self.piece_seconds < 1e9:
            raise ConfigError(f"piece_seconds={self.piece_seconds}: give at least 0")
        if self.ways not in (1, 2):
            raise ConfigError(f"ways={self.ways}: 1, or 2 when copying out is waited for too")

    def swap_seconds(self, tokens: int) -> float:
        size = tokens * self.shape.token_bytes
        return self.ways * (size / self.link + self._starting_seconds(size))

    def _starting_seconds(self, size: int) -> float:
        """What the pieces of a copy in one direction take beside their bytes."""
        return math.ceil(size / self.piece_bytes) * self.piece_seconds

    def recompute_seconds(self, tokens: int) -> float:
        attention = 2 * self.shape.layers * self.attention_width * tokens
        return tokens * (2 * self.parameters + attention) / self.flops

    def crossover_link(self, tokens: int) -> float:
        """Bytes per second from which on copying `tokens` tokens is the faster way.

        Infinity where the pieces alone take longer than computing anew.
        """
        size = tokens * self.shape.token_bytes
        left = self.recompute_seconds(tokens) / self.ways - self._starting_seconds(size)
        return size / left if left > 0 else math.inf
