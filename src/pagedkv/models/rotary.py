"""Rotary position embedding, with the same float32 arithmetic as transformers."""

from __future__ import annotations

import math

import torch

from pagedkv.models.config import RopeConfig


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
    """Cosines and sines of every position, computed once: two float32 tables [P, D / 2].

    A table, not a computation in each step: the vectorised cosine may round differently by the
    place of an element in its tensor, and a row's result must not depend on the batch.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_positions: int) -> None:
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = positions[:, None] * inverse_frequencies(rope, head_dim)
        self._cos, self._sin = angles.cos(), angles.sin()

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines for `apply`: float32 [T, 1, D / 2] each."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of each head: [T, heads, D] -> the same shape and dtype.

    Computed in float32 and rounded once.
    """
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
