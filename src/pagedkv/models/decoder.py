"""One decoder for the Llama, Mistral, Qwen2 and Qwen3 families.

Symbols: T tokens of the step, m rows whose logits are wanted, V vocabulary, H query heads,
G K/V heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch

from pagedkv.attention.interface import AttentionBackend, Plan
from pagedkv.models.activation import make_silu_mul
from pagedkv.models.config import ModelConfig
from pagedkv.models.linear import Matrix, embed, make_linear
from pagedkv.models.native import find_native
from pagedkv.models.rotary import Rotary, apply_rotary


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer; matrices are [out, in], biases and norms 1-D."""

    input_norm: torch.Tensor
    qkv: Matrix  # query, key and value projections stacked: [(H + 2 G) D, hidden]
    output: Matrix
    post_norm: torch.Tensor
    gate_up: Matrix  # gate above up
    down: Matrix
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None  # [D]
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Weights of a whole model in one dtype. `head` is `embedding` itself when they are tied."""

    embedding: Matrix  # [V, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Matrix  # [V, hidden]


class Decoder:
    """Computes logits; keeps no state but the weights, K/V live in the attention backend.

    With the native extension the logits of a row are bit-identical whatever else is in the batch,
    given a backend that keeps the same promise. `kernels` and `deterministic` are as for
    `find_native`, and raise as it does.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        deterministic: bool = False,
        kernels: str = "auto",
    ) -> None:
        native = find_native(kernels, deterministic)
        self.config, self.weights = config, weights
        self.deterministic = deterministic
        self.dtype = weights.embedding.dtype
        self._embedding, self._norm = weights.embedding, weights.norm
        self._rotary = Rotary(config.rope, config.head_dim, config.max_position_embeddings)
        self._layers = [_Layer(config, layer, native) for layer in weights.layers]
        self._head = make_linear(weights.head, None, native)

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        backend: AttentionBackend,
        plan: Plan,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Run one ragged batch: writes its K/V through the plan, returns float32 logits [m, V].

        tokens, positions: int32 or int64 [T], 0 <= token < V, 0 <= position <
        max_position_embeddings. rows: int64 [m], indices into T; only these rows get logits, and
        m may be 0. The caller owns the result.
        """
        x = embed(self._embedding, tokens)
        cos, sin = self._rotary.at(positions)
        for index, layer in enumerate(self._layers):
            x = layer(index, x, cos, sin, backend, plan)
        x = rms_norm(x[rows], self._norm, self.config.rms_norm_eps)
        return self._head(x).float()


class _Layer:
    """Attention, then MLP, each added to its input."""

    def __init__(
        self, config: ModelConfig, weights: LayerWeights, native: ModuleType | None
    ) -> None:
        self._config = config
        self._weights = weights
        self._qkv = make_linear(weights.qkv, weights.qkv_bias, native)
        self._output = make_linear(weights.output, weights.output_bias, native)
        self._gate_up = make_linear(weights.gate_up, weights.gate_up_bias, native)
        self._down = make_linear(weights.down, weights.down_bias, native)
        self._silu_mul = make_silu_mul(native)

    def __call__(
        self,
        index: int,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        backend: AttentionBackend,
        plan: Plan,
    ) -> torch.Tensor:
        config, weights = self._config, self._weights
        heads, kv_heads, eps = config.num_heads, config.num_kv_heads, config.rms_norm_eps
        qkv = self._qkv(rms_norm(x, weights.input_norm, eps))
        qkv = qkv.view(len(x), heads + 2 * kv_heads, config.head_dim)
        q, k, v = qkv.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = rms_norm(q, weights.q_norm, eps), rms_norm(k, weights.k_norm, eps)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        attended = backend.run(plan, index, q, k, v.contiguous())
        x = x + self._output(attended.view(len(x), -1))
        gate_up = self._gate_up(rms_norm(x, weights.post_norm, eps))
        return x + self._down(self._silu_mul(gate_up))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension in float32, round to x's dtype, then scale by the weight."""
    x32 = x.float()
    variance = x32.pow(2).mean(-1, keepdim=True)
    return weight * (x32 * torch.rsqrt(variance + eps)).to(x.dtype)
