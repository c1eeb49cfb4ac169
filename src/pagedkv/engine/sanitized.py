"""An attention backend under the sanitizer: nothing reaches the kernels unchecked.

Between the steps it fills what was freed with NaN, takes checksums of what was published, and
compares those of what was hit. Before a step it holds copies, slots and tables against the shadow
state, after every layer it looks for NaN in what attention returns.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.attention.interface import AttentionBackend, AttentionBatch, NativeStep, Plan
from pagedkv.cache.errors import Misuse
from pagedkv.cache.sanitizer import Sanitizer

_BLOCKS_AT_ONCE = 64  # bounds the scratch of poisoning and of checksums


class _Seal(NamedTuple):
    """The K/V of a published block: of which generation, how many slots, their checksum."""

    generation: int
    slots: int
    checksum: int


class SanitizedPlan:
    """The plan of the backend inside, the batch it was made for, and whose the rows are."""

    def __init__(self, plan: Plan, batch: AttentionBatch, seqs: npt.NDArray[np.int64]) -> None:
        self.plan, self.batch, self.seqs = plan, batch, seqs

    @property
    def num_shared_spans(self) -> int:
        return self.plan.num_shared_spans


class SanitizedBackend:
    """An AttentionBackend around another one. Batches must say whose their rows are (`seqs`).

    Raises SanitizerError. Blocks that are read or written as a whole must be held or leased.
    """

    def __init__(self, inner: AttentionBackend, sanitizer: Sanitizer) -> None:
        self._inner, self._sanitizer = inner, sanitizer
        self.name, self.spec = inner.name, inner.spec
        self._seals: dict[int, _Seal] = {}

    def plan(self, batch: AttentionBatch) -> SanitizedPlan:
        if batch.seqs is None:
            raise ValueError("the sanitizer needs the sequences of the batch's rows: set seqs")
        self._settle()
        self._sanitizer.check_writes(batch.seqs, batch.query_lens, batch.slots)
        self._sanitizer.check_reads(batch.seqs, batch.context_lens, batch.tables)
        for block in np.unique(batch.slots // self.spec.block_size).tolist():
            self._seals.pop(block, None)
        copy = AttentionBatch(
            batch.query_lens.copy(),
            batch.context_lens.copy(),
            batch.tables.copy(),
            batch.slots.copy(),
        )
        return SanitizedPlan(self._inner.plan(batch), copy, batch.seqs.copy())

    def run(
        self, plan: Plan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        plan = _own(plan)
        out = self._inner.run(plan.plan, layer, q, k, v)
        self._check_layer(plan, layer, q, k, v, out)
        return out

    def native_step(self, plan: Plan) -> NativeStep | None:
        plan = _own(plan)
        step = self._inner.native_step(plan.plan)
        return step and replace(step, after_layer=partial(self._check_layer, plan))

    def _check_layer(
        self,
        plan: SanitizedPlan,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        wrong = torch.isnan(out).any(dim=(1, 2)) if out.isnan().any() else None
        if wrong is not None:
            self._explain(plan, layer, wrong.numpy(), _finite(q, k, v))

    def copy_blocks(self, copies: npt.NDArray[np.int32]) -> None:
        self._settle()
        self._sanitizer.check_copies(copies)
        self._inner.copy_blocks(copies)

    def read_blocks(
        self, ids: npt.NDArray[np.int32], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._settle()
        self._sanitizer.check_blocks(ids)
        return self._inner.read_blocks(ids, out)

    def write_blocks(self, ids: npt.NDArray[np.int32], data: torch.Tensor) -> None:
        self._settle()
        self._sanitizer.check_fills(ids)
        for block in ids.tolist():
            self._seals.pop(block, None)
        self._inner.write_blocks(ids, data)

    # ---- between the steps --------------------------------------------------------------------

    def _settle(self) -> None:
        """Brings the store up to date with what the manager has done since the last call."""
        sanitizer = self._sanitizer
        blocks, generations, extents = sanitizer.take_to_seal()
        for block, generation, slots, checksum in self._checksums(blocks, generations, extents):
            self._seals[block] = _Seal(generation, slots, checksum)
        blocks, generations, extents = sanitizer.take_to_verify()
        sealed = [self._seals.get(block, _Seal(0, 0, 0)) for block in blocks.tolist()]
        same = np.array([s.generation for s in sealed], np.int64) == generations
        extents = np.array([s.slots for s in sealed], np.int32)
        for block, generation, _, checksum in self._checksums(
            blocks[same], generations[same], extents[same]
        ):
            if self._seals[block].checksum != checksum:
                sanitizer.fail(
                    Misuse.WRONG_HIT,
                    f"the K/V of block {block} (generation {generation}) has changed since it was "
                    "published",
                    block=block,
                )
        self._poison(sanitizer.take_to_poison())

    def _poison(self, blocks: npt.NDArray[np.int32]) -> None:
        spec = self.spec
        one = (spec.num_layers, 2, spec.block_size, spec.num_kv_heads, spec.head_dim)
        for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
            piece = blocks[start : start + _BLOCKS_AT_ONCE]
            nan = torch.full((len(piece), *one), float("nan"), dtype=spec.dtype)
            self._inner.write_blocks(piece, nan)

    def _checksums(
        self,
        blocks: npt.NDArray[np.int32],
        generations: npt.NDArray[np.int64],
        extents: npt.NDArray[np.int32],
    ) -> list[tuple[int, int, int, int]]:
        """(block, generation, slots, CRC-32 of the first `slots` slots of all layers)."""
        found = []
        for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
            part = slice(start, start + _BLOCKS_AT_ONCE)
            data = self._inner.read_blocks(blocks[part])
            for block, generation, slots, kv in zip(
                blocks[part].tolist(),
                generations[part].tolist(),
                extents[part].tolist(),
                data,
                strict=True,
            ):
                content = kv[:, :, :slots].contiguous().view(torch.uint8).numpy()
                found.append((block, generation, slots, zlib.crc32(content)))
        return found

    # ---- after a layer ------------------------------------------------------------------------

    def _explain(
        self,
        plan: SanitizedPlan,
        layer: int,
        wrong: npt.NDArray[np.bool_],
        finite: npt.NDArray[np.bool_],
    ) -> None:
        """Says where the NaN of tokens comes from, unless it was the model that brought it.

        wrong: tokens whose output has NaN. finite: tokens whose q, k and v are finite.
        """
        batch = plan.batch
        ends = np.cumsum(batch.query_lens)
        rows = np.searchsorted(ends, np.flatnonzero(wrong), side="right")
        size = self.spec.block_size
        for row in np.unique(rows).tolist():
            if not finite[ends[row] - batch.query_lens[row] : ends[row]].all():
                continue
            seq, length = int(plan.seqs[row]), int(batch.context_lens[row])
            blocks = batch.tables[row, : -(-length // size)]
            stored = self._inner.read_blocks(blocks)[:, layer].isnan().any(dim=(1, 3, 4))
            places = np.flatnonzero(stored.numpy().reshape(-1)[:length])
            if not len(places):
                self._sanitizer.fail(
                    Misuse.NAN,
                    f"layer {layer}: no position that sequence {seq} may read holds NaN",
                    seq=seq,
                )
            block, slot = int(blocks[places[0] // size]), int(places[0]) % size
            self._sanitizer.fail(
                Misuse.NAN,
                f"layer {layer}: position {places[0]} of sequence {seq}, slot {slot} of block "
                f"{block}, holds NaN: it was never written, or its block was freed",
                block=block,
                seq=seq,
            )


def _own(plan: Plan) -> SanitizedPlan:
    if not isinstance(plan, SanitizedPlan):
        raise ValueError(f"this {type(plan).__name__} was made by another backend")
    return plan


def _finite(*tensors: torch.Tensor) -> npt.NDArray[np.bool_]:
    """For each token whether all of its values are finite."""
    parts = [tensor.isfinite().all(dim=2).all(dim=1) for tensor in tensors]
    mask: npt.NDArray[np.bool_] = torch.stack(parts).all(dim=0).numpy()
    return mask
