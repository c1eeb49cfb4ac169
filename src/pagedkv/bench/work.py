"""What a step of a model has to read and to compute, part by part.

Activations are left out: they are small beside weights and K/V, and stay in the caches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pagedkv.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes of weights and K/V, and operations: a multiplication or an addition each."""

    num_bytes: float
    operations: float


def total(parts: Iterable[Work]) -> Work:
    parts = list(parts)
    return Work(sum(p.num_bytes for p in parts), sum(p.operations for p in parts))


def step_work(
    config: ModelConfig, dtype: torch.dtype, rows: int, context: int, query: int = 1
) -> dict[str, Work]:
    """Of `rows` rows that compute the last `query` of `context` tokens and sample one each.

    All layers together, in the order of a step. A part that computes no matrix has no operations
    here: their rate does not bound it.
    """
    tokens, size, layers = rows * query, dtype.itemsize, config.num_layers
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads

    def matrix(outputs: int, inputs: int, count: int = tokens, times: int = layers) -> Work:
        weights = outputs * inputs * times
        return Work(weights * size, 2 * weights * count)

    kv_bytes = 2 * kv_heads * dim * size * layers  # of a token
    seen = rows * query * (2 * context - query + 1) // 2
    return {
        "embedding": Work(tokens * hidden * size, 0),
        "norm, QKV": matrix((heads + 2 * kv_heads) * dim, hidden),
        "rotary, write": Work(tokens * kv_bytes, 0),
        "attention": Work(rows * context * kv_bytes, 4 * heads * dim * layers * seen),
        "output": matrix(hidden, heads * dim),
        "norm, gate and up, SiLU": matrix(2 * inner, hidden),
        "down": matrix(hidden, inner),
        "norm, head": matrix(config.vocab_size, hidden, rows, 1),
    }
