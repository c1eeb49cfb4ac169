"""The pool is as large as it was asked to be: what `stored_block_bytes` says is what is taken."""

from __future__ import annotations

import pytest
import torch

from pagedkv.attention.backends import make_backend, stored_block_bytes
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

    def recording(size: int) -> torch.Tensor:
        taken.append(size)
        return allocate(size)

    monkeypatch.setattr(native, "allocate", recording)
    wanted = spec(head_dim, dtype)
    make_backend("native", wanted)
    assert taken == [7 * stored_block_bytes("native", wanted)]
    assert stored_block_bytes("gather", wanted) == wanted.block_bytes
    if head_dim % 8 == 0:
        assert stored_block_bytes("native", wanted) == wanted.block_bytes
