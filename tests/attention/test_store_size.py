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


@pytest.mark.parametrize("name", BACKENDS)
def test_a_preallocated_store_has_its_pages(name: str) -> None:
    """And it is zero like any other: what is touched is not changed."""
    wanted = replace(spec(64, torch.float32), num_blocks=10_000)
    before = resident_bytes()
    backend = make_backend(name, wanted, preallocate=True)
    grown = resident_bytes() - before
    assert grown > 0.95 * wanted.block_bytes * wanted.num_blocks
    assert not backend.read_blocks(np.array([0, 1, 10_000], np.int32)).any()


@pytest.mark.parametrize("name", BACKENDS)
def test_otherwise_pages_come_with_the_first_write(name: str) -> None:
    wanted = replace(spec(64, torch.float32), num_blocks=10_000)
    before = resident_bytes()
    backend = make_backend(name, wanted)
    grown = resident_bytes() - before
    assert backend.spec == wanted
    assert grown < 0.1 * wanted.block_bytes * wanted.num_blocks


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
