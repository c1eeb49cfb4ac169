"""Blocks in and out of every backend's store, and the arithmetic of their addresses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tables import spec_of

from pagedkv.attention import KVSpec, make_backend
from pagedkv.attention.batch import position_slots
from pagedkv.attention.native import import_native

BACKENDS = ["reference", "gather", "native"]
SPECS = [
    spec_of(heads=4, kv_heads=2, dim=8, blocks=5, block_size=4, layers=3),
    spec_of(heads=2, kv_heads=2, dim=12, blocks=4, block_size=1, layers=2),  # padded head
    spec_of(heads=3, kv_heads=3, dim=5, blocks=30, block_size=3, dtype=torch.bfloat16, layers=2),
]


def random_blocks(spec: KVSpec, count: int) -> torch.Tensor:
    shape = (count, spec.num_layers, 2, spec.block_size, spec.num_kv_heads, spec.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(spec.dtype)


def every_block(spec: KVSpec) -> np.ndarray:
    return np.arange(spec.num_blocks + 1, dtype=np.int32)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("spec", SPECS)
def test_store_starts_as_zeros_null_block_included(name: str, spec: KVSpec) -> None:
    assert not make_backend(name, spec).read_blocks(every_block(spec)).any()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("spec", SPECS)
def test_blocks_come_back_as_they_were_written(name: str, spec: KVSpec) -> None:
    backend = make_backend(name, spec)
    content = random_blocks(spec, spec.num_blocks + 1)
    order = np.random.default_rng(0).permutation(spec.num_blocks + 1).astype(np.int32)
    backend.write_blocks(order, content)
    assert torch.equal(backend.read_blocks(order), content)
    some = order[[2, 0]]
    out = torch.empty_like(content[:2])
    assert backend.read_blocks(some, out) is out
    assert torch.equal(out, content[[2, 0]])
    assert backend.read_blocks(order[:0]).shape == (0, *content.shape[1:])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("spec", SPECS)
def test_copy_moves_the_filled_slots_of_all_layers_only(name: str, spec: KVSpec) -> None:
    backend = make_backend(name, spec)
    content = random_blocks(spec, spec.num_blocks + 1)
    backend.write_blocks(every_block(spec), content)
    half = (spec.block_size + 1) // 2
    backend.copy_blocks(np.array([[1, 2, half], [4, 3, spec.block_size]], np.int32))
    content[2, :, :, :half] = content[1, :, :, :half]
    content[3] = content[4]
    assert torch.equal(backend.read_blocks(every_block(spec)), content)
    backend.copy_blocks(np.zeros((0, 3), np.int32))
    backend.copy_blocks(np.array([[1, 3, 0]], np.int32))
    assert torch.equal(backend.read_blocks(every_block(spec)), content)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("copies", "value"),
    [
        ([[0, 1, 1]], "0"),
        ([[1, 6, 1]], "6"),
        ([[1, 2, 5]], "5"),
        ([[1, 2, -1]], "-1"),
        ([[1, 2, 1], [2, 3, 1]], "block 2"),
        ([[1, 3, 1], [2, 3, 1]], "3, 3"),
        ([[1, 2]], "(1, 2)"),
    ],
)
def test_impossible_copy_is_refused_and_changes_nothing(
    name: str, copies: list[list[int]], value: str
) -> None:
    spec = SPECS[0]
    backend = make_backend(name, spec)
    content = random_blocks(spec, spec.num_blocks + 1)
    backend.write_blocks(every_block(spec), content)
    with pytest.raises(ValueError) as refusal:
        backend.copy_blocks(np.array(copies, np.int32))
    assert value in str(refusal.value)
    assert torch.equal(backend.read_blocks(every_block(spec)), content)


@pytest.mark.parametrize("name", BACKENDS)
def test_ids_and_buffers_that_do_not_fit_are_refused(name: str) -> None:
    spec = SPECS[0]
    backend = make_backend(name, spec)
    for ids in ([6], [-1]):
        with pytest.raises(ValueError, match=str(ids[0])):
            backend.read_blocks(np.array(ids, np.int32))
        with pytest.raises(ValueError, match=str(ids[0])):
            backend.write_blocks(np.array(ids, np.int32), random_blocks(spec, 1))
    one = np.array([1], np.int32)
    for wrong in (random_blocks(spec, 2), random_blocks(spec, 1).double()):
        with pytest.raises(ValueError, match="expected contiguous"):
            backend.write_blocks(one, wrong)
        with pytest.raises(ValueError, match="expected contiguous"):
            backend.read_blocks(one, wrong)


def test_address_of_a_slot_does_not_wrap_at_32_bits() -> None:
    """block_id * stride in 32 bits wraps for big pools (vllm#50427, #1486, vllm PR#47671)."""
    block, stride = 2**20, 2**14  # elements of a block: K and V of 4 heads * 16 slots * 128
    offset = import_native().slot_offset(
        block, slot=3, head=2, num_kv_heads=4, block_size=16, padded_dim=128, dtype="bfloat16"
    )
    assert offset == block * stride + 2 * 2 * 16 * 128 + 3 * 2
    table = np.array([2**31 - 1], np.int32)
    slots = position_slots(table, np.array([5]), block_size=16)
    assert slots.tolist() == [(2**31 - 1) * 16 + 5]


def test_block_bytes_count_every_layer_key_and_value() -> None:
    spec = spec_of(heads=9, kv_heads=3, dim=64, block_size=16, layers=30)
    assert spec.block_bytes == 30 * 2 * 16 * 3 * 64 * 4
