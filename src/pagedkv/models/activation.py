"""The MLP's gate: silu(gate) * up."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F

from pagedkv.attention.native import import_native
from pagedkv.errors import ConfigError

SiluMul = Callable[[torch.Tensor], torch.Tensor]


def make_silu_mul(deterministic: bool) -> SiluMul:
    """A function [T, 2 I] -> [T, I] of the fused gate and up projections.

    torch's vectorised exponential and its scalar tail may differ in the last bit, by the place of
    an element in its tensor; the deterministic mode uses the native kernel, which has one path for
    every element. Raises ConfigError when it is asked for and not built.
    """
    return _native_silu_mul(_native()) if deterministic else _torch_silu_mul


def _torch_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _native_silu_mul(native: ModuleType) -> SiluMul:
    def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
        out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        native.silu_mul(gate_up, out)
        return out

    return silu_mul


def _native() -> ModuleType:
    try:
        return import_native()
    except ImportError as error:
        raise ConfigError(
            "deterministic=True needs the native extension, which is not built "
            f"({error}): install pagedkv with a C++ compiler at hand, or set deterministic=False"
        ) from error
