"""Linear layers: as fast as torch has them, or with one order of accumulation for any batch.

torch picks its matrix kernel by the number of rows, so a row's last bits depend on how many other
rows are computed with it. Over a *fixed* number of rows a row gets the same bits wherever it
stands. `FixedTileLinear` therefore always computes tiles of `TILE_ROWS` rows, padding the last.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

# Part of the arithmetic: changing it changes last bits. Chosen by measurement (docs/decisions).
TILE_ROWS = 16


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


class FixedTileLinear:
    """A row's bits depend on that row alone."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        out = x.new_empty((rows, self._weight.shape[0]))
        for start in range(0, rows, TILE_ROWS):
            tile = x[start : start + TILE_ROWS]
            missing = TILE_ROWS - tile.shape[0]
            if missing:
                tile = F.pad(tile, (0, 0, 0, missing))
            y = F.linear(tile, self._weight, self._bias)
            out[start : start + TILE_ROWS] = y[: TILE_ROWS - missing]
        return out


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, deterministic: bool) -> Linear:
    """weight [N, K], bias [N] or None; both are kept, not copied."""
    return FixedTileLinear(weight, bias) if deterministic else PlainLinear(weight, bias)
