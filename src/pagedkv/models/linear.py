"""Linear layers and the embedding: by the native kernels, or by torch where those are not built.

torch picks its matrix kernel by the number of rows, so a row's last bits depend on how many other
rows are computed with it. The native kernels keep one order of accumulation for any number.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from pagedkv.attention.isa import chosen_isa
from pagedkv.attention.native import to_dlpack
from pagedkv.models.packed import PackedMatrix

Matrix = torch.Tensor | PackedMatrix  # [N, K]


class Linear(Protocol):
    """y = x W^T + b."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] -> [T, N] in the dtype of x; T may be 0."""
        ...


class PlainLinear:
    """torch's own kernel for the rows at hand."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class NativeLinear:
    """A row's bits depend on that row alone, on one machine and `isa`.

    Accumulates in float32 and rounds once. `isa` forces a code path, None takes the best that
    this machine has, unless PAGEDKV_ISA forces one. ValueError for an x of another width, dtype or
    with strides in its rows.
    """

    def __init__(
        self, weight: PackedMatrix, bias: torch.Tensor | None = None, isa: str | None = None
    ) -> None:
        native = weight.native
        self._outputs = weight.shape[0]
        self._kernel: Any = native.Linear(
            weight.data,
            None if bias is None else to_dlpack(bias.float().contiguous()),
            isa or chosen_isa(native),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((x.shape[0], self._outputs))
        self._kernel.run(to_dlpack(x), to_dlpack(out))
        return out


def make_linear(weight: Matrix, bias: torch.Tensor | None) -> Linear:
    """weight [N, K], bias [N] or None: by the native kernels if the weight is packed for them."""
    if isinstance(weight, PackedMatrix):
        return NativeLinear(weight, bias)
    return PlainLinear(weight, bias)


def linear_kernels(native: ModuleType | None) -> str:
    """Which kernels run the linear layers, for people: a path of native, or torch."""
    return "torch" if native is None else f"native ({chosen_isa(native)})"


def embed(weight: Matrix, tokens: torch.Tensor) -> torch.Tensor:
    """The rows of weight [V, K] at tokens: int32 or int64 [T] -> [T, K], a new tensor."""
    return weight.gather(tokens) if isinstance(weight, PackedMatrix) else weight[tokens]
