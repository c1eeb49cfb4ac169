"""The pool is as large as it was asked to be: what `stored_block_bytes` says is what is taken."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pagedkv.attention.backends import BACKENDS, make_backend, stored_block_bytes
from pagedkv.attention.interface import KVSpec
from pagedkv.attention.native import import_native


def spec(head_dim: int, dtype: torch.dtype) -> KVSpec:
    return KVSpec(
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        num_blocks=6,
        block_size=3,
        dtype=dtype,
    )


LARGE = replace(spec(64, torch.float32), num_blocks=10_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [1, 5, 8, 64, 80])
def test_memory_taken_is_the_memory_counted(
    head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A memory setting that is ignored (vllm.cpp#357): here by the padding of odd heads."""
    native, taken = import_native(), []
    allocate = native.allocate

    def recording(size: int, touched: bool) -> torch.Tensor:
        taken.append(size)
        return allocate(size, touched)

    monkeypatch.setattr(native, "allocate", recording)
    wanted = spec(head_dim, dtype)
    make_backend("native", wanted)
    assert taken == [7 * stored_block_bytes("native", wanted)]
    assert stored_block_bytes("gather", wanted) == wanted.block_bytes
    if head_dim % 8 == 0:
        assert stored_block_bytes("native", wanted) == wanted.block_bytes


def test_a_preallocated_store_has_its_pages() -> None:
    before = resident_bytes()
    backend = make_backend("native", LARGE, preallocate=True)
    assert resident_bytes() - before > 0.95 * LARGE.block_bytes * LARGE.num_blocks
    assert not backend.read_blocks(np.array([0, 1, LARGE.num_blocks], np.int32)).any()


def test_otherwise_pages_come_with_the_first_write() -> None:
    before = resident_bytes()
    backend = make_backend("native", LARGE)
    assert resident_bytes() - before < 0.1 * LARGE.block_bytes * LARGE.num_blocks
    assert backend.spec is LARGE


@pytest.mark.parametrize("name", BACKENDS)
def test_a_preallocated_store_is_zero_like_any_other(name: str) -> None:
    backend = make_backend(name, spec(64, torch.float32), preallocate=True)
    assert not backend.read_blocks(np.arange(7, dtype=np.int32)).any()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
