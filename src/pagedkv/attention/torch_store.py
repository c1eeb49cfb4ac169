"""A K/V store as one torch tensor, for the backends written in torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.attention.batch import (
    canonical_shape,
    check_blocks,
    checked_copies,
    checked_ids,
)
from pagedkv.attention.interface import KVSpec


class TorchStore:
    """K and V of every layer: [L, 2, num_blocks + 1, B, G, D], zero at first. Owns its tensor."""

    def __init__(self, spec: KVSpec, *, preallocate: bool = False) -> None:
        self.spec = spec
        blocks = (spec.num_blocks + 1, spec.block_size, spec.num_kv_heads, spec.head_dim)
        # By numpy: it leaves zero pages to the system, where torch.zeros writes the whole pool.
        memory = torch.from_numpy(np.zeros((spec.num_blocks + 1) * spec.block_bytes, np.uint8))
        if preallocate:
            memory.zero_()
        self._data = memory.view(spec.dtype).view(spec.num_layers, 2, *blocks)

    def slots(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer as views by slot: two [(num_blocks + 1) * B, G, D]."""
        keys, values = self._data[layer].flatten(1, 2)
        return keys, values

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Puts k, v [T, G, D] into slots int64 [T]."""
        keys, values = self.slots(layer)
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)

    def copy_blocks(self, copies: npt.NDArray[np.int32]) -> None:
        for source, destination, filled in checked_copies(copies, self.spec).tolist():
            self._data[:, :, destination, :filled] = self._data[:, :, source, :filled]

    def read_blocks(
        self, ids: npt.NDArray[np.int32], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        index = torch.from_numpy(checked_ids(ids, self.spec))
        if out is None:
            out = torch.empty(canonical_shape(self.spec, len(index)), dtype=self.spec.dtype)
        check_blocks(self.spec, "out", out, len(index))
        out.copy_(self._data[:, :, index].permute(2, 0, 1, 3, 4, 5))
        return out

    def write_blocks(self, ids: npt.NDArray[np.int32], data: torch.Tensor) -> None:
        index = torch.from_numpy(checked_ids(ids, self.spec))
        check_blocks(self.spec, "data", data, len(index))
        self._data[:, :, index] = data.permute(1, 2, 0, 3, 4, 5)
