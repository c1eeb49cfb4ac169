"""The one interface of attention over a block table. Nothing outside this room knows the layout.

Symbols: n rows, T tokens of the step, w table width, H query heads, G K/V heads, D head_dim,
B block size, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of the K/V store. Block ids are 1..num_blocks; block 0 is the null block."""

    num_layers: int
    num_heads: int  # H, query heads; a multiple of num_kv_heads
    num_kv_heads: int  # G
    head_dim: int  # D
    num_blocks: int
    block_size: int
    dtype: torch.dtype  # float32 or bfloat16

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers, K and V."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return per_token * self.block_size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Host description of one step's ragged batch; prefill chunks and decode rows together.

    Row i computes `query_lens[i]` new tokens, the last of which stands at absolute position
    `context_lens[i] - 1`; they attend causally to the row's positions 0..own position, found
    through `tables[i]`. `slots` say where the new tokens' K/V go (block * B + offset).
    """

    query_lens: npt.NDArray[np.int32]  # [n] >= 1
    context_lens: npt.NDArray[np.int32]  # [n] >= query_lens
    tables: npt.NDArray[np.int32]  # [n, w], padded with 0
    slots: npt.NDArray[np.int64]  # [T]
    seqs: npt.NDArray[np.int64] | None = None  # [n], whose the rows are: for the sanitizer alone


class Plan(Protocol):
    """What a backend prepared for one step; all else of it is opaque outside the backend."""

    @property
    def num_shared_spans(self) -> int:
        """Spans of positions whose K/V is read once for several rows."""
        ...


@dataclass(frozen=True, slots=True)
class NativeStep:
    """A plan for a decoder that runs all layers natively: it writes and attends by itself.

    after_layer: called with (layer, q, k, v, attention's output), as `run` has them, where the
    backend wants to see them; the tensors are valid during the call.
    """

    store: Any  # the extension's Store
    tasks: Any  # the extension's Plan
    after_layer: (
        Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None] | None
    ) = None


class AttentionBackend(Protocol):
    """Owns the K/V tensors. `plan` once a step, `run` once a layer or `native_step` for all.

    `run` does no allocation beyond its output and no checks beyond shapes.
    """

    name: str
    spec: KVSpec

    def plan(self, batch: AttentionBatch) -> Plan:
        """Validates ids, lengths and slots against the spec (ValueError names the value)."""
        ...

    def run(
        self, plan: Plan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Writes k, v ([T, G, D]) to the plan's slots, then attends: q [T, H, D] -> [T, H, D]."""
        ...

    def native_step(self, plan: Plan) -> NativeStep | None:
        """What a native decoder needs in place of `run`; None: there are no native kernels."""
        ...

    def copy_blocks(self, copies: npt.NDArray[np.int32]) -> None:
        """Copies the first `filled` slots of source to destination: int32 [c, 3], all layers.

        Rows are done as if at once: no destination of the call is a source of it.
        """
        ...

    def read_blocks(
        self, ids: npt.NDArray[np.int32], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Blocks in canonical layout: [len(ids), L, 2, B, G, D] in the store's dtype."""
        ...

    def write_blocks(self, ids: npt.NDArray[np.int32], data: torch.Tensor) -> None:
        """Inverse of `read_blocks`."""
        ...
