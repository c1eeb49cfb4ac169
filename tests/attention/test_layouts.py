"""Packed groups of 16 slots, rows for other block sizes: the same bits, and nothing unseen is read.

The store of every case starts as NaN wherever no token was written, the slot that shares a 4-byte
lane with the last written one included.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tables import Rows, attend, lay_out, spec_of
from test_determinism import DTYPES, assert_same_bits

from pagedkv.attention import make_backend
from pagedkv.attention.native import import_native

ISAS = import_native().available_isas()
BLOCK_SIZES = [1, 2, 3, 5, 8, 15, 16, 17, 32, 48, 128]
SHAPES = [(3, 1, 64), (5, 1, 40), (2, 2, 5), (2, 1, 256)]  # 40: a register and a half
LENGTHS = [1, 2, 15, 16, 17, 31, 127, 128, 129, 143, 200]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_block_size_gives_the_same_bits_and_the_right_ones(
    shape: tuple[int, int, int], dtype: torch.dtype, isa: str
) -> None:
    rows = Rows.random(LENGTHS, *shape, dtype)
    new = [min(n, 1 + 3 * (i % 4)) for i, n in enumerate(LENGTHS)]
    case = lay_out(rows, new, 16)
    want = attend(make_backend("native", case.spec, isa=isa), case)
    exact = attend(make_backend("reference", case.spec), case)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(want, exact, rtol=0, atol=tolerance)
    for block_size in BLOCK_SIZES:
        case = lay_out(rows, new, block_size, seed=block_size)
        assert_same_bits(attend(make_backend("native", case.spec, isa=isa), case), want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_a_later_token_wrote_never_reaches_an_earlier_one(
    dtype: torch.dtype, isa: str, poison: float
) -> None:
    """Of each pair of positions in a lane, of each group of 16, of each tile, of each span."""
    clean = Rows.random([140], 3, 1, 16, dtype)
    case = lay_out(clean, [140], 16)
    want = attend(make_backend("native", case.spec, isa=isa), case)
    for position in (1, 2, 15, 16, 17, 18, 127, 128, 139):
        k, v = clean.k[0].clone(), clean.v[0].clone()
        k[position], v[position] = poison, poison
        case = lay_out(Rows(clean.q, [k], [v]), [140], 16)
        got = attend(make_backend("native", case.spec, isa=isa), case)
        assert_same_bits(got[:position], want[:position])
        assert not torch.isfinite(got[position:]).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [5, 8, 64])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_blocks_are_written_read_and_copied_to_any_filled_slot(
    block_size: int, dim: int, dtype: torch.dtype
) -> None:
    spec = spec_of(4, 2, dim, 3, block_size, dtype, layers=2)
    backend = make_backend("native", spec)
    every = np.arange(4, dtype=np.int32)
    shape = (4, 2, 2, block_size, 2, dim)
    content = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    backend.write_blocks(every, content)
    assert torch.equal(backend.read_blocks(every), content)
    for filled in {0, 1, 2, block_size // 2, block_size - 1, block_size} & {*range(block_size + 1)}:
        backend.write_blocks(every, content)
        backend.copy_blocks(np.array([[1, 2, filled]], np.int32))
        want = content.clone()
        want[2, :, :, :filled] = content[1, :, :, :filled]
        assert torch.equal(backend.read_blocks(every), want)
