"""Shapes of attention: their tables, bytes and operations against a count of every position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedkv.bench.attention import Shape, filled_backend, measure_attention, step_batch
from pagedkv.errors import ConfigError

SHAPES = [
    Shape(3, 7, 1, 0, 4, 4, 2, 8, 2),
    Shape(2, 13, 5, 8, 4, 2, 1, 16, 1),
    Shape(1, 6, 6, 0, 16, 2, 2, 8, 1),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_and_operations_are_those_of_the_positions(shape: Shape) -> None:
    ids = np.arange(1, shape.num_blocks + 1, dtype=np.int32)
    tables = shape.tables(ids)
    assert set(tables.ravel()) == set(ids.tolist())
    slots = {
        (row[position // shape.block_size], position % shape.block_size)
        for row in tables.tolist()
        for position in range(shape.context_len)
    }
    assert shape.layer_bytes(torch.bfloat16) == (
        2 * len(slots) * shape.num_kv_heads * shape.head_dim * 2
    )
    seen = sum(
        position + 1
        for position in range(shape.context_len - shape.query_len, shape.context_len)
        for _ in range(shape.batch_size)
    )
    assert shape.layer_operations == 4 * shape.head_dim * shape.num_heads * seen


@pytest.mark.parametrize("shape", SHAPES)
def test_new_tokens_lie_at_the_end_of_their_rows(shape: Shape) -> None:
    tables = shape.tables(np.arange(1, shape.num_blocks + 1, dtype=np.int32))
    batch = step_batch(tables, shape.context_len, shape.query_len, shape.block_size)
    expected = [
        row[position // shape.block_size] * shape.block_size + position % shape.block_size
        for row in tables.tolist()
        for position in range(shape.context_len - shape.query_len, shape.context_len)
    ]
    assert batch.slots.tolist() == expected
    assert len(set(expected)) == len(expected)


def test_a_filled_backend_has_no_empty_block() -> None:
    spec = Shape(5, 40, 1, 0, 4, 2, 1, 8, 2).spec(torch.float32)
    backend = filled_backend("reference", spec)
    content = backend.read_blocks(np.arange(1, spec.num_blocks + 1, dtype=np.int32))
    assert bool((content != 0).all())


def test_a_store_that_does_not_fit_is_refused_before_it_is_made() -> None:
    with pytest.raises(ConfigError, match=r"batch_size=64, context_len=1024, num_layers=8 take"):
        measure_attention(Shape(), torch.float32, "reference", memory=10_000)
