"""The MLP's gate: silu(gate) * up."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F

from pagedkv.attention.isa import chosen_isa
from pagedkv.attention.native import to_dlpack

SiluMul = Callable[[torch.Tensor], torch.Tensor]


def make_silu_mul(native: ModuleType | None) -> SiluMul:
    """A function [T, 2 I] -> [T, I] of the fused gate and up projections.

    torch's vectorised exponential and its scalar tail may differ in the last bit, by the place of
    an element in its tensor; the `native` kernel has one path for every element. None: torch's.
    """
    return _torch_silu_mul if native is None else _native_silu_mul(native)


def _torch_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _native_silu_mul(native: ModuleType) -> SiluMul:
    isa = chosen_isa(native)

    def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
        out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        native.silu_mul(to_dlpack(gate_up), to_dlpack(out), isa)
        return out

    return silu_mul
