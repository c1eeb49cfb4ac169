"""Checks of the interface's arguments, shared by every backend."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.attention.interface import AttentionBatch, KVSpec
from pagedkv.errors import ConfigError

_Integer = TypeVar("_Integer", np.int32, np.int64)

MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16)


def check_spec(spec: KVSpec) -> None:
    """Raises ConfigError when no backend can hold such a store."""
    for field in (
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "num_blocks",
        "block_size",
    ):
        if getattr(spec, field) < 1:
            raise ConfigError(f"{field}={getattr(spec, field)}: must be at least 1")
    if spec.num_heads % spec.num_kv_heads:
        raise ConfigError(
            f"num_heads={spec.num_heads} is not a multiple of num_kv_heads={spec.num_kv_heads}"
        )
    if spec.head_dim > MAX_HEAD_DIM:
        raise ConfigError(f"head_dim={spec.head_dim}: at most {MAX_HEAD_DIM} is supported")
    if spec.dtype not in DTYPES:
        raise ConfigError(f"dtype={spec.dtype}: use torch.float32 or torch.bfloat16 for K/V")


def softmax_scale(spec: KVSpec, scale: float | None) -> float:
    """The given factor of the scores, or 1/sqrt(D).

    ConfigError unless it is from 1e-30 to 1e30: kernels reckon in float32, which has room beyond.
    """
    if scale is None:
        return 1 / math.sqrt(spec.head_dim)
    if not 1e-30 <= scale <= 1e30:
        raise ConfigError(
            f"scale={scale!r} of the scores: give a number from 1e-30 to 1e30, or None"
        )
    return float(scale)


def checked_copy(batch: AttentionBatch, spec: KVSpec) -> AttentionBatch:
    """A private, contiguous copy of the batch once every id, length and slot has been checked.

    The copy is the plan's own: the caller may refill its buffers for the next step at once.
    Raises ValueError that names the value; nothing has happened then.
    """
    query_lens = _integers("query_lens", batch.query_lens, np.int32)
    context_lens = _integers("context_lens", batch.context_lens, np.int32)
    tables = _integers("tables", batch.tables, np.int32)
    slots = _integers("slots", batch.slots, np.int64)
    n = len(query_lens)
    if query_lens.shape != (n,) or context_lens.shape != (n,):
        raise ValueError(
            f"query_lens {query_lens.shape} and context_lens {context_lens.shape} must be [n]"
        )
    if tables.ndim != 2 or len(tables) != n:
        raise ValueError(f"tables has shape {tables.shape}, expected [{n}, w]")
    for row in _where(query_lens < 1):
        raise ValueError(f"query_lens[{row}]={query_lens[row]}: must be at least 1")
    for row in _where(context_lens < query_lens):
        raise ValueError(
            f"context_lens[{row}]={context_lens[row]} is less than query_lens[{row}]="
            f"{query_lens[row]}: the context includes the new tokens"
        )
    total = int(query_lens.sum(dtype=np.int64))
    if slots.shape != (total,):
        raise ValueError(f"slots has shape {slots.shape}, expected one slot a token: [{total}]")
    used_blocks = -(-context_lens.astype(np.int64) // spec.block_size)
    for row in _where(used_blocks > tables.shape[1]):
        raise ValueError(
            f"context_lens[{row}]={context_lens[row]} needs {used_blocks[row]} blocks of "
            f"{spec.block_size}, the table is {tables.shape[1]} wide"
        )
    used = np.arange(tables.shape[1]) < used_blocks[:, None]
    for place in _where(used & ((tables < 1) | (tables > spec.num_blocks))):
        row, column = divmod(place, tables.shape[1])
        raise ValueError(
            f"tables[{row}, {column}]={tables[row, column]}: a used block id is "
            f"1..{spec.num_blocks}"
        )
    first, end = spec.block_size, (spec.num_blocks + 1) * spec.block_size
    for token in _where((slots < first) | (slots >= end)):
        raise ValueError(f"slots[{token}]={slots[token]}: a slot is {first}..{end - 1}")
    return AttentionBatch(query_lens, context_lens, tables, slots)


def _where(wrong: npt.NDArray[np.bool_]) -> list[int]:
    """Flat places that are wrong: none, in a step's batch."""
    # Counting takes a fifth of the time of looking for places that are not there.
    return np.flatnonzero(wrong).tolist() if np.count_nonzero(wrong) else []


def _integers(name: str, values: npt.ArrayLike, dtype: type[_Integer]) -> npt.NDArray[_Integer]:
    """A contiguous copy as `dtype`. ValueError where that would change a value."""
    given = np.asarray(values)
    copy = given.astype(dtype, order="C")
    if given.dtype != copy.dtype and not np.array_equal(copy, given):
        raise ValueError(f"{name} must be integers that fit {copy.dtype}, not {given.dtype}")
    return copy


def check_run(
    spec: KVSpec,
    num_tokens: int,
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Raises ValueError when the tensors of `run` do not have the plan's shapes."""
    if not 0 <= layer < spec.num_layers:
        raise ValueError(f"layer={layer}: the store has layers 0..{spec.num_layers - 1}")
    kv_shape = (num_tokens, spec.num_kv_heads, spec.head_dim)
    q_shape = (num_tokens, spec.num_heads, spec.head_dim)
    for name, tensor, shape in (("q", q, q_shape), ("k", k, kv_shape), ("v", v, kv_shape)):
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the plan needs {shape}")
        if tensor.dtype != spec.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, the store is {spec.dtype}")


def checked_ids(ids: npt.NDArray[np.int32], spec: KVSpec) -> npt.NDArray[np.int64]:
    """Block ids of `read_blocks` / `write_blocks` as int64; the null block (0) is allowed."""
    checked = _integers("ids", ids, np.int64)
    if checked.ndim != 1:
        raise ValueError(f"ids has shape {checked.shape}, expected [m]")
    for i in np.flatnonzero((checked < 0) | (checked > spec.num_blocks)):
        raise ValueError(f"ids[{i}]={checked[i]}: block ids are 0..{spec.num_blocks}")
    return checked


def checked_copies(copies: npt.NDArray[np.int32], spec: KVSpec) -> npt.NDArray[np.int64]:
    """Rows (source, destination, filled slots) as int64 [c, 3]. Raises ValueError."""
    checked = _integers("copies", copies, np.int64)
    if checked.ndim != 2 or checked.shape[1] != 3:
        raise ValueError(f"copies has shape {checked.shape}, expected [c, 3]")
    source, destination, filled = checked.T
    ids = checked[:, :2]
    for row, column in np.argwhere((ids < 1) | (ids > spec.num_blocks)):
        raise ValueError(
            f"copies[{row}, {column}]={ids[row, column]}: a block id is 1..{spec.num_blocks}"
        )
    for row in np.flatnonzero((filled < 0) | (filled > spec.block_size)):
        raise ValueError(f"copies[{row}] fills {filled[row]} slots, a block has {spec.block_size}")
    for row in np.flatnonzero(np.isin(destination, source)):
        raise ValueError(f"copies[{row}] writes block {destination[row]}, a source of this call")
    if len(np.unique(destination)) != len(destination):
        raise ValueError(f"copies writes a block twice: destinations {destination.tolist()}")
    return checked


def canonical_shape(spec: KVSpec, count: int) -> tuple[int, ...]:
    """Shape of `count` blocks in the canonical layout: (blocks, L, 2, B, G, D)."""
    return (count, spec.num_layers, 2, spec.block_size, spec.num_kv_heads, spec.head_dim)


def check_blocks(spec: KVSpec, name: str, data: torch.Tensor, count: int) -> None:
    """Raises ValueError unless `data` holds `count` blocks in the canonical layout."""
    shape = canonical_shape(spec, count)
    if data.shape != shape or data.dtype != spec.dtype or not data.is_contiguous():
        raise ValueError(
            f"{name} is {data.dtype} {tuple(data.shape)}, expected contiguous {spec.dtype} {shape}"
        )


def position_slots(
    table: npt.NDArray[np.int32], positions: npt.NDArray[np.int64], block_size: int
) -> npt.NDArray[np.int64]:
    """Slot of each absolute position of one row: table[p // B] * B + p % B, in 64 bit."""
    return table[positions // block_size].astype(np.int64) * block_size + positions % block_size
