"""A decoder lowered to one native call a step: all layers by one team of threads."""

from __future__ import annotations

from typing import Any

import torch

from pagedkv.attention.interface import NativeStep
from pagedkv.attention.isa import chosen_isa
from pagedkv.attention.native import to_dlpack
from pagedkv.models.config import ModelConfig
from pagedkv.models.packed import PackedMatrix
from pagedkv.models.parts import DecoderWeights, LayerWeights


class NativeDecoder:
    """The layers and the head of weights that are all packed. Shares the matrices.

    The residual stream, norms, rotations and activations are float32; what a matrix multiplies is
    rounded once to the weights' dtype. The logits of a row are bit-identical whatever else is in
    the batch, on one machine and `isa` (None: as `chosen_isa`).
    """

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, isa: str | None = None
    ) -> None:
        if not isinstance(weights.head, PackedMatrix):
            raise ValueError("the native decoder needs packed weights")
        native = weights.head.native
        self._vocabulary = weights.head.shape[0]
        self._decoder: Any = native.Decoder(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            epsilon=config.rms_norm_eps,
            layers=[_layer(native, layer) for layer in weights.layers],
            norm=_floats(weights.norm),
            head=weights.head.data,
            isa=isa or chosen_isa(native),
        )

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: NativeStep,
        rows: torch.Tensor,
        out: torch.Tensor | None = None,
        best: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Embedded tokens [T, hidden] to float32 logits [m, V] of rows int64 [m].

        cos, sin: float32 [T, D / 2]. Writes the K/V of all layers through the step's plan. The
        result is the first rows of `out` [>= m, V], or a new tensor. best: see `Decoder.forward`.
        """
        if out is None:
            out = torch.empty((len(rows), self._vocabulary), dtype=torch.float32)
        logits = out[: len(rows)]
        self._decoder.forward(
            step.store,
            step.tasks,
            to_dlpack(x),
            to_dlpack(cos),
            to_dlpack(sin),
            rows.contiguous().numpy(),
            to_dlpack(logits),
            step.after_layer,
            None if best is None else to_dlpack(best[: len(rows)]),
        )
        return logits

    def profile(self) -> dict[str, float]:
        """Seconds that each part of a step took, summed over layers and over all steps so far."""
        seconds: dict[str, float] = self._decoder.profile()
        return seconds


def is_packed(weights: DecoderWeights) -> bool:
    """Whether a NativeDecoder can run them."""
    return isinstance(weights.head, PackedMatrix)


def _layer(native: Any, weights: LayerWeights) -> Any:
    matrices = {
        name: getattr(weights, name).data for name in ("qkv", "output", "gate", "up", "down")
    }
    return native.LayerWeights(
        input_norm=_floats(weights.input_norm),
        post_norm=_floats(weights.post_norm),
        qkv_bias=_floats(weights.qkv_bias),
        output_bias=_floats(weights.output_bias),
        gate_bias=_floats(weights.gate_bias),
        up_bias=_floats(weights.up_bias),
        down_bias=_floats(weights.down_bias),
        query_norm=_floats(weights.q_norm),
        key_norm=_floats(weights.k_norm),
        **matrices,
    )


def _floats(values: torch.Tensor | None) -> torch.Tensor | None:
    return None if values is None else values.float().contiguous()
