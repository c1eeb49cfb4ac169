"""Attention by the C++ kernels, which walk the block table. Bit-identical by construction.

The extension takes its OpenMP symbols from the runtime that torch has already loaded, so torch is
imported first, always.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# The one import for all rooms; torch re-exports it without saying so, which mypy refuses.
from torch.utils.dlpack import to_dlpack as to_dlpack  # type: ignore[attr-defined]

from pagedkv.attention.batch import (
    canonical_shape,
    check_blocks,
    check_run,
    check_spec,
    checked_copies,
    checked_copy,
    checked_ids,
    softmax_scale,
)
from pagedkv.attention.interface import AttentionBatch, KVSpec, NativeStep, Plan
from pagedkv.attention.isa import chosen_isa
from pagedkv.errors import ConfigError


def import_native() -> ModuleType:
    """The extension `pagedkv._native`. Raises ImportError when it was not built or cannot load."""
    from pagedkv import _native

    module: ModuleType = _native
    return module


def stored_block_bytes(spec: KVSpec) -> int:
    """Bytes of one block in the native store, which pads heads to whole vectors."""
    padded_dim = import_native().padded_head_dim(spec.head_dim)
    return replace(spec, head_dim=padded_dim).block_bytes


@dataclass(frozen=True, slots=True)
class NativePlan:
    tasks: Any  # the extension's Plan: its own copy of the tables, and the work items
    num_tokens: int
    owner: NativeBackend

    @property
    def num_shared_spans(self) -> int:
        """Spans of 128 positions read once for several rows, counted once a group of rows."""
        return int(self.tasks.num_shared_spans)


class NativeBackend:
    """K/V packed as it is written, in the layout of native/layout.h; K beside V of a head's block.

    `isa` is one of the extension's available_isas(), or None for the best that this machine has,
    unless PAGEDKV_ISA forces one. The bits of a query row's result depend on q and on K, V of its
    positions only: not on the block size, the other rows, the chunking or the number of threads.
    Spans that lie in the same blocks for several rows of a step are read once for all of them;
    `shared_spans` counts those of all plans.
    """

    name = "native"

    def __init__(
        self,
        spec: KVSpec,
        *,
        scale: float | None = None,
        isa: str | None = None,
        preallocate: bool = False,
    ) -> None:
        check_spec(spec)
        self.spec = spec
        self._native = import_native()
        available = self._native.available_isas()
        if isa is not None and isa not in available:
            raise ConfigError(f"isa={isa!r}: this machine and build have {available}")
        self.shared_spans = 0
        self.isa: str = isa or chosen_isa(self._native)
        size = stored_block_bytes(spec) * (spec.num_blocks + 1)
        memory = self._native.allocate(size, touched=preallocate)
        self._store = self._native.Store(
            memory,
            spec.num_layers,
            spec.num_blocks,
            spec.block_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            str(spec.dtype).removeprefix("torch."),
            softmax_scale(spec, scale),
            self.isa,
        )

    def plan(self, batch: AttentionBatch, *, share: bool = True) -> NativePlan:
        """As the interface says. Without `share` every row reads alone: the same bits, slower."""
        batch = checked_copy(batch, self.spec)
        tasks = self._native.Plan(
            self._store,
            batch.query_lens,
            batch.context_lens,
            batch.tables,
            batch.slots,
            torch.get_num_threads(),
            share,
        )
        plan = NativePlan(tasks, len(batch.slots), self)
        self.shared_spans += plan.num_shared_spans
        return plan

    def run(
        self, plan: Plan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        plan = self._own(plan)
        check_run(self.spec, plan.num_tokens, layer, q, k, v)
        out = torch.empty(q.shape, dtype=q.dtype)
        self._store.run(
            plan.tasks,
            layer,
            to_dlpack(q),
            to_dlpack(k),
            to_dlpack(v),
            to_dlpack(out),
        )
        return out

    def native_step(self, plan: Plan) -> NativeStep:
        return NativeStep(self._store, self._own(plan).tasks)

    def _own(self, plan: Plan) -> NativePlan:
        # The kernels trust a plan's ids: those of a larger pool would lead out of this one.
        if not isinstance(plan, NativePlan) or plan.owner is not self:
            raise ValueError(f"this {type(plan).__name__} was made by another backend")
        return plan

    def copy_blocks(self, copies: npt.NDArray[np.int32]) -> None:
        self._store.copy_blocks(checked_copies(copies, self.spec))

    def read_blocks(
        self, ids: npt.NDArray[np.int32], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        index = checked_ids(ids, self.spec)
        if out is None:
            out = torch.empty(canonical_shape(self.spec, len(index)), dtype=self.spec.dtype)
        check_blocks(self.spec, "out", out, len(index))
        self._store.read_blocks(index, out)
        return out

    def write_blocks(self, ids: npt.NDArray[np.int32], data: torch.Tensor) -> None:
        index = checked_ids(ids, self.spec)
        check_blocks(self.spec, "data", data, len(index))
        self._store.write_blocks(index, data)
