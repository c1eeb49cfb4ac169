"""Attention by copying K/V out of the blocks into contiguous scratch, then torch's SDPA.

The baseline that a kernel which walks the table is measured against. It is kept honest: scratch
is allocated in `plan` only, grouped heads are views (never expanded in memory), and decode rows of
like length are one call.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from pagedkv.attention.batch import (
    check_run,
    check_spec,
    checked_copy,
    position_slots,
    softmax_scale,
)
from pagedkv.attention.interface import AttentionBatch, KVSpec, Plan
from pagedkv.attention.torch_store import TorchStore


@dataclass(frozen=True, slots=True)
class _Call:
    """One SDPA call: `rows` sequences of `length` gathered positions each."""

    tokens: slice | torch.Tensor  # which of the step's tokens are the queries
    index: torch.Tensor  # int64 [rows * length], slots in order of position
    rows: int
    length: int
    mask: torch.Tensor | None  # bool, True = attend


@dataclass(frozen=True, slots=True)
class GatherPlan:
    slots: torch.Tensor
    calls: tuple[_Call, ...]
    owner: GatherBackend
    num_shared_spans: int = 0  # every row reads its own


class GatherBackend:
    """Copy, then attend. Results depend on the batch in the last bits (torch chooses the order)."""

    name = "gather"

    def __init__(
        self, spec: KVSpec, *, scale: float | None = None, preallocate: bool = False
    ) -> None:
        check_spec(spec)
        self.spec = spec
        self._scale = softmax_scale(spec, scale)
        self._store = TorchStore(spec, preallocate=preallocate)
        self._scratch = torch.empty((2, 0), dtype=spec.dtype)

    def plan(self, batch: AttentionBatch) -> GatherPlan:
        batch = checked_copy(batch, self.spec)
        starts = np.cumsum(batch.query_lens, dtype=np.int64) - batch.query_lens
        calls = [
            self._plan_chunk(batch, int(row), int(starts[row]))
            for row in np.flatnonzero(batch.query_lens > 1)
        ]
        decodes = np.flatnonzero(batch.query_lens == 1)
        # Rows of like length share a call, so that less than half of what it gathers is padding.
        doublings = np.frexp(batch.context_lens[decodes])[1]
        for doubling in np.unique(doublings):
            rows = decodes[doublings == doubling]
            calls.append(self._plan_decodes(batch, rows, starts[rows]))
        width = self.spec.num_kv_heads * self.spec.head_dim
        needed = max((len(call.index) for call in calls), default=0) * width
        if needed > self._scratch.shape[1]:
            self._scratch = torch.empty((2, needed), dtype=self.spec.dtype)
        return GatherPlan(torch.from_numpy(batch.slots), tuple(calls), self)

    def _plan_chunk(self, batch: AttentionBatch, row: int, start: int) -> _Call:
        query_len, length = int(batch.query_lens[row]), int(batch.context_lens[row])
        index = position_slots(batch.tables[row], np.arange(length), self.spec.block_size)
        own = torch.arange(length - query_len, length)
        mask = torch.arange(length) <= own[:, None]
        return _Call(slice(start, start + query_len), torch.from_numpy(index), 1, length, mask)

    def _plan_decodes(
        self, batch: AttentionBatch, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]
    ) -> _Call:
        lengths = batch.context_lens[rows].astype(np.int64)
        longest = int(lengths.max())
        # Past its end a row repeats its position 0: masked, but masked NaN would still be NaN.
        positions = np.arange(longest) * (np.arange(longest) < lengths[:, None])
        blocks = np.take_along_axis(batch.tables[rows], positions // self.spec.block_size, axis=1)
        index = blocks.astype(np.int64) * self.spec.block_size + positions % self.spec.block_size
        mask = None
        if (lengths != longest).any():
            mask = torch.from_numpy(np.arange(longest) < lengths[:, None])[:, None, None, :]
        return _Call(
            torch.from_numpy(tokens),
            torch.from_numpy(index.reshape(-1)),
            len(rows),
            longest,
            mask,
        )

    def run(
        self, plan: Plan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if not isinstance(plan, GatherPlan) or plan.owner is not self:
            raise ValueError(f"this {type(plan).__name__} was made by another backend")
        check_run(self.spec, len(plan.slots), layer, q, k, v)
        self._store.write(layer, plan.slots, k, v)
        out = torch.empty_like(q)
        for call in plan.calls:
            keys, values = self._gather(layer, call)
            out[call.tokens] = self._attend(q[call.tokens], keys, values, call)
        return out

    def _gather(self, layer: int, call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a call, contiguous in scratch, as views [rows, G, length, D]."""
        heads, dim = self.spec.num_kv_heads, self.spec.head_dim
        views = []
        for source, scratch in zip(self._store.slots(layer), self._scratch, strict=True):
            target = scratch[: len(call.index) * heads * dim].view(-1, heads, dim)
            torch.index_select(source, 0, call.index, out=target)
            views.append(target.view(call.rows, call.length, heads, dim).transpose(1, 2))
        return views[0], views[1]

    def _attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: _Call
    ) -> torch.Tensor:
        """q [t, H, D] -> [t, H, D]; query heads of one K/V head become an axis of views."""
        grouped = q.view(len(q), self.spec.num_kv_heads, -1, self.spec.head_dim)  # [t, G, H/G, D]
        if isinstance(call.tokens, torch.Tensor):  # decode: a group's heads are its queries
            mixed = scaled_dot_product_attention(
                grouped, keys, values, call.mask, scale=self._scale
            )
        else:  # chunk: the group index is the batch, K/V are broadcast with stride 0
            groups = grouped.shape[2]
            mixed = scaled_dot_product_attention(
                grouped.permute(2, 1, 0, 3),
                keys.expand(groups, -1, -1, -1),
                values.expand(groups, -1, -1, -1),
                call.mask,
                scale=self._scale,
            ).permute(2, 1, 0, 3)
        return mixed.flatten(1, 2)

    def native_step(self, plan: Plan) -> None:
        """There are no native kernels here."""

    def copy_blocks(self, copies: npt.NDArray[np.int32]) -> None:
        self._store.copy_blocks(copies)

    def read_blocks(
        self, ids: npt.NDArray[np.int32], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._store.read_blocks(ids, out)

    def write_blocks(self, ids: npt.NDArray[np.int32], data: torch.Tensor) -> None:
        self._store.write_blocks(ids, data)
