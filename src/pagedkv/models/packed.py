"""A weight matrix in the order in which the native kernels read it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from pagedkv.attention.native import to_dlpack

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class PackedMatrix:
    """[N, K] of float32 or bfloat16, kept once, in panels of outputs (native/linear.h).

    Starts as zeros that take memory when they are written. Owns its memory.
    """

    def __init__(self, native: ModuleType, rows: int, columns: int, dtype: torch.dtype) -> None:
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"dtype={dtype} of a packed matrix: use float32 or bfloat16")
        self.native = native
        self.shape = torch.Size((rows, columns))
        self.dtype = dtype
        self.data: Any = native.PackedMatrix(rows, columns, DTYPE_NAMES[dtype])

    @classmethod
    def of(cls, native: ModuleType, weight: torch.Tensor) -> PackedMatrix:
        """A packed copy of [N, K]."""
        packed = cls(native, weight.shape[0], weight.shape[1], weight.dtype)
        packed.rows(0, len(weight)).copy_(weight)
        return packed

    def rows(self, first: int, count: int) -> PackedRows:
        """The place of rows [first, first + count)."""
        return PackedRows(self, first, count)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """A new [len(ids), K] of the rows at int32 or int64 `ids`; ValueError for others."""
        out = torch.empty((len(ids), self.shape[1]), dtype=self.dtype)
        self.data.gather(to_dlpack(ids.long().contiguous()), to_dlpack(out))
        return out


class PackedRows:
    """Some rows of a packed matrix, to be written as one would write a view of a tensor."""

    def __init__(self, matrix: PackedMatrix, first: int, count: int) -> None:
        self._matrix, self._first = matrix, first
        self.shape = torch.Size((count, matrix.shape[1]))

    def copy_(self, source: torch.Tensor) -> None:
        """Write [count, K], converted to the matrix's dtype; ValueError for another shape."""
        if source.shape != self.shape:
            raise ValueError(f"source has shape {list(source.shape)}, not {list(self.shape)}")
        rows = source.to(self._matrix.dtype).contiguous()
        self._matrix.data.write_rows(self._first, to_dlpack(rows))
