"""What a decoder is made of: its weights, by their part in it.

Symbols: V vocabulary, H query heads, G K/V heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedkv.models.linear import Matrix


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer; matrices are [out, in], biases and norms 1-D."""

    input_norm: torch.Tensor
    qkv: Matrix  # query, key and value projections stacked: [(H + 2 G) D, hidden]
    output: Matrix
    post_norm: torch.Tensor
    gate: Matrix
    up: Matrix
    down: Matrix
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None  # [D]
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Weights of a whole model in one dtype. `head` is `embedding` itself when they are tied.

    The matrices are all packed or all plain tensors, but for an embedding that is not the head: it
    is only looked up and stays a tensor.
    """

    embedding: Matrix  # [V, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Matrix  # [V, hidden]
