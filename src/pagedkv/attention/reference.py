"""Attention over the block table in plain torch and float64: slow, obviously right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

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
class ReferencePlan:
    batch: AttentionBatch
    owner: ReferenceBackend
    num_shared_spans: int = 0  # every row reads its own


class ReferenceBackend:
    """What the other backends are compared with. Position by position, one formula each."""

    name = "reference"

    def __init__(
        self, spec: KVSpec, *, scale: float | None = None, preallocate: bool = False
    ) -> None:
        check_spec(spec)
        self.spec = spec
        self._scale = softmax_scale(spec, scale)
        self._store = TorchStore(spec, preallocate=preallocate)

    def plan(self, batch: AttentionBatch) -> ReferencePlan:
        return ReferencePlan(checked_copy(batch, self.spec), self)

    def run(
        self, plan: Plan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if not isinstance(plan, ReferencePlan) or plan.owner is not self:
            raise ValueError(f"this {type(plan).__name__} was made by another backend")
        batch, spec = plan.batch, self.spec
        check_run(spec, len(batch.slots), layer, q, k, v)
        self._store.write(layer, torch.from_numpy(batch.slots), k, v)
        keys, values = self._store.slots(layer)
        out = torch.empty_like(q)
        token = 0
        for row, query_len in enumerate(batch.query_lens.tolist()):
            for position in range(
                int(batch.context_lens[row]) - query_len, int(batch.context_lens[row])
            ):
                seen = torch.from_numpy(
                    position_slots(batch.tables[row], np.arange(position + 1), spec.block_size)
                )
                grouped = q[token].double().view(spec.num_kv_heads, -1, spec.head_dim)
                scores = torch.einsum("ghd,sgd->ghs", grouped, keys[seen].double()) * self._scale
                weights = torch.softmax(scores, dim=-1)
                mixed = torch.einsum("ghs,sgd->ghd", weights, values[seen].double())
                out[token] = mixed.reshape(spec.num_heads, spec.head_dim).to(q.dtype)
                token += 1
        return out

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
