"""Rotary position embedding, with the same float32 arithmetic as transformers."""

from __future__ import annotations

import math

import torch

from pagedkv.models.config import RopeConfig

CHUNK = 1024  # positions that are computed together


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions: float32 [D / 2].

    Llama 3's scaling as in transformers' `_compute_llama3_parameters`: long wavelengths are
    stretched by `factor`, short ones kept, those between interpolated.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    low, high, original = (
        rope.low_freq_factor,
        rope.high_freq_factor,
        rope.original_max_position_embeddings,
    )
    wavelengths = 2 * math.pi / frequencies
    long, short = wavelengths > original / low, wavelengths < original / high
    scaled = torch.where(long, frequencies / rope.factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where(~(long | short), between, scaled)


class Rotary:
    """Cosines and sines, computed once for each position: two float32 tables [P, D / 2].

    Tables, not a computation in each step: the vectorised cosine may round differently by the
    place of an element in its tensor, and a row's result must not depend on the batch. They grow
    to the positions that are asked for, in chunks of one shape, so that how they grew leaves no
    trace either; a config may promise far more positions than any sequence has.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_positions: int) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim)
        self._max_positions = max_positions
        self._cos = self._sin = torch.empty(0, head_dim // 2)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines for `apply`: float32 [T, 1, D / 2] each.

        IndexError for a position that is not below `max_positions`.
        """
        if len(positions):
            self._grow(int(positions.max()) + 1)
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def _grow(self, count: int) -> None:
        size = len(self._cos)
        if count <= size or count > self._max_positions:
            return
        # Twice as many, so that a long sequence copies each row a constant number of times.
        end = min(-(-max(count, 2 * size) // CHUNK) * CHUNK, self._max_positions)
        chunks = [self._angles(first) for first in range(size, end, CHUNK)]
        self._cos = torch.cat([self._cos, *(angles.cos() for angles in chunks)])[:end]
        self._sin = torch.cat([self._sin, *(angles.sin() for angles in chunks)])[:end]

    def _angles(self, first: int) -> torch.Tensor:
        """[CHUNK, D / 2] of the positions from `first` on."""
        positions = torch.arange(first, first + CHUNK).to(torch.float32)
        return positions[:, None] * self._frequencies


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of each head: [T, heads, D] -> the same shape and dtype.

    Computed in float32 and rounded once.
    """
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
