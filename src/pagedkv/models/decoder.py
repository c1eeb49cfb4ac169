"""One decoder for the Llama, Mistral, Qwen2 and Qwen3 families: native where it can be.

Symbols: T tokens of the step, m rows whose logits are wanted, V vocabulary, H query heads,
G K/V heads, D head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagedkv.attention.interface import AttentionBackend, Plan
from pagedkv.errors import ConfigError
from pagedkv.models.config import ModelConfig
from pagedkv.models.linear import embed, make_linear
from pagedkv.models.native_decoder import NativeDecoder, is_packed
from pagedkv.models.parts import DecoderWeights, LayerWeights
from pagedkv.models.rotary import Rotary, apply_rotary


class Decoder:
    """Computes logits; keeps no state but the weights, K/V live in the attention backend.

    Packed weights over a backend with native kernels run as one native call a step (NativeDecoder):
    the logits of a row are then bit-identical whatever else is in the batch. Everything else runs
    layer by layer in torch, but for the products with packed matrices; plain weights are what the
    native decoder is compared with. `deterministic`: ConfigError if the weights are not packed; the
    backend is the caller's to choose.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        deterministic: bool = False,
    ) -> None:
        if deterministic and not is_packed(weights):
            raise ConfigError(
                "deterministic=True needs weights that are packed for the native kernels: load "
                "the model with them, or set deterministic=False"
            )
        self.config, self.weights = config, weights
        self.deterministic = deterministic
        self.dtype = weights.embedding.dtype
        self._embedding = weights.embedding
        self._rotary = Rotary(config.rope, config.head_dim, config.max_position_embeddings)
        self._native = NativeDecoder(config, weights) if is_packed(weights) else None
        self._layers = [_Layer(config, layer) for layer in weights.layers]
        self._head = make_linear(weights.head, None)

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        backend: AttentionBackend,
        plan: Plan,
        rows: torch.Tensor,
        out: torch.Tensor | None = None,
        best: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one ragged batch: writes its K/V through the plan, returns float32 logits [m, V].

        tokens, positions: int32 or int64 [T], 0 <= token < V, 0 <= position <
        max_position_embeddings. rows: int64 [m], indices into T; only these rows get logits, and
        m may be 0. The caller owns the result. out: float32 [>= m, V], contiguous, whose first rows
        may serve for it: to take fresh memory for the logits of a large batch costs a good part of
        a millisecond. best: int64 [>= m], contiguous, whose first places are filled with the token
        of the largest logit of each row, the first of equals; NaN, if there is one, counts as the
        largest.
        """
        x = embed(self._embedding, tokens)
        cos, sin = self._rotary.at(positions)
        step = backend.native_step(plan)
        if self._native is not None and step is not None:
            return self._native.forward(x, cos.squeeze(1), sin.squeeze(1), step, rows, out, best)
        for index, layer in enumerate(self._layers):
            x = layer(index, x, cos, sin, backend, plan)
        x = rms_norm(x[rows], self.weights.norm, self.config.rms_norm_eps)
        logits = self._head(x).float()
        if best is not None:
            torch.argmax(logits, dim=1, out=best[: len(rows)])
        return logits


class _Layer:
    """Attention, then MLP, each added to its input: by torch."""

    def __init__(self, config: ModelConfig, weights: LayerWeights) -> None:
        self._config = config
        self._weights = weights
        self._qkv = make_linear(weights.qkv, weights.qkv_bias)
        self._output = make_linear(weights.output, weights.output_bias)
        self._gate = make_linear(weights.gate, weights.gate_bias)
        self._up = make_linear(weights.up, weights.up_bias)
        self._down = make_linear(weights.down, weights.down_bias)

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
        normed = rms_norm(x, weights.post_norm, eps)
        return x + self._down(F.silu(self._gate(normed)) * self._up(normed))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension in float32, round to x's dtype, then scale by the weight."""
    x32 = x.float()
    variance = x32.pow(2).mean(-1, keepdim=True)
    return weight * (x32 * torch.rsqrt(variance + eps)).to(x.dtype)
