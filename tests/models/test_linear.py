"""The native linear layers: right, exact where they copy, and clear about what they refuse."""

from __future__ import annotations

import pytest
import torch

from pagedkv.attention.native import import_native
from pagedkv.models.linear import NativeLinear, embed, make_linear
from pagedkv.models.packed import PackedMatrix

NATIVE = import_native()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ISAS = pytest.mark.parametrize("isa", NATIVE.available_isas())
SHAPES = [(1, 1), (7, 63), (63, 7), (577, 33), (576, 960), (1536, 64), (3, 577)]  # K, N


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def native(weight: torch.Tensor, bias: torch.Tensor | None = None, isa: str | None = None):
    return NativeLinear(PackedMatrix.of(NATIVE, weight), bias, isa)


@DTYPES
@ISAS
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_against_float64(dtype, isa: str, with_bias: bool, inputs: int, outputs: int) -> None:
    weight = random(outputs, inputs, dtype=dtype, seed=1)
    bias = random(outputs, dtype=dtype, seed=2) if with_bias else None
    layer = native(weight, bias, isa)
    for rows in (1, 2, 13, 48):
        x = random(rows, inputs, dtype=dtype)
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        size = x.double().abs() @ weight.double().abs().T + 1
        error = (layer(x).double() - exact).abs()
        # float32 throughout; bfloat16 rounds the result once, to 8 bits.
        rounding = exact.abs() * 2**-8 if dtype == torch.bfloat16 else 0
        assert (error <= 1e-6 * size + rounding).all()


@DTYPES
def test_no_rows_give_no_rows(dtype) -> None:
    out = native(random(5, 3, dtype=dtype))(random(0, 3, dtype=dtype))
    assert out.shape == (0, 5) and out.dtype == dtype


@DTYPES
@ISAS
def test_rows_may_be_strided(dtype, isa: str) -> None:
    """Slices of a wider tensor, every other row, one row repeated: read where they lie."""
    layer = native(random(40, 33, dtype=dtype, seed=1), None, isa)
    wide = random(30, 70, dtype=dtype)
    for x in (wide[:, 5:38], wide[::2, :33], wide[3, :33].expand(14, 33)):
        assert torch.equal(layer(x), layer(x.contiguous()))


@DTYPES
@ISAS
@pytest.mark.parametrize("inputs", [34, 2048])
def test_rows_that_lie_badly_give_the_same_bits(dtype, isa: str, inputs: int) -> None:
    """At any distance: at some, rows meet in the same lines of a cache and are copied first."""
    layer = native(random(96, inputs, dtype=dtype, seed=1), None, isa)
    x = random(26, inputs, dtype=dtype)
    expected = layer(x)
    for distance in (inputs + 2, 2048, 4096, 4098, 3072):
        wide = torch.full((26, max(distance, inputs)), float("nan"), dtype=dtype)
        wide[:, :inputs] = x
        assert torch.equal(layer(wide[:, :inputs]), expected)


@DTYPES
@ISAS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_of_nan_or_infinity_stays_alone(dtype, isa: str, bad: float) -> None:
    layer = native(random(45, 39, dtype=dtype, seed=1), random(45, dtype=dtype), isa)
    x = random(27, 39, dtype=dtype)
    clean = layer(x)
    for row in (0, 5, 26):
        spoilt = x.clone()
        spoilt[row] = bad
        got = layer(spoilt)
        others = torch.arange(27) != row
        assert torch.equal(got[others], clean[others])
        assert not got[row].isfinite().any()


@DTYPES
@ISAS
def test_an_output_of_nan_weights_stays_alone(dtype, isa: str) -> None:
    """Outputs share panels: the weights of one must not reach its neighbours."""
    weight, x = random(45, 39, dtype=dtype, seed=1), random(14, 39, dtype=dtype)
    clean = native(weight, None, isa)(x)
    weight[7] = torch.nan
    got = native(weight, None, isa)(x)
    others = torch.arange(45) != 7
    assert torch.equal(got[:, others], clean[:, others]) and got[:, 7].isnan().all()


@DTYPES
def test_memory_around_the_result_is_left_alone(dtype) -> None:
    matrix = NATIVE.PackedMatrix(37, 5, str(dtype).removeprefix("torch."))
    matrix.write_rows(0, random(37, 5, dtype=dtype))
    around = torch.full((16, 50), 7.0, dtype=dtype)
    kernel = NATIVE.Linear(matrix, None, NATIVE.available_isas()[-1])
    kernel.run(random(14, 5, dtype=dtype, seed=1), around[1:15, 6:43])
    inside = torch.zeros(16, 50, dtype=torch.bool)
    inside[1:15, 6:43] = True
    assert (around[~inside] == 7).all() and not (around[inside] == 7).any()


@DTYPES
def test_rows_come_back_from_the_packed_matrix(dtype) -> None:
    weight = random(67, 13, dtype=dtype)
    packed = PackedMatrix(NATIVE, 67, 13, dtype)
    for first, count in ((40, 27), (0, 1), (1, 39)):  # parts that share panels, in any order
        packed.rows(first, count).copy_(weight[first : first + count])
    for ids in ([66, 0, 0, 31, 32, 33], []):
        for index in (torch.int32, torch.int64):
            tokens = torch.tensor(ids, dtype=index)
            for matrix in (packed, weight):
                assert torch.equal(embed(matrix, tokens), weight[ids])


def test_writing_converts() -> None:
    packed = PackedMatrix(NATIVE, 4, 3, torch.bfloat16)
    weight = random(4, 3, dtype=torch.float16)
    packed.rows(0, 4).copy_(weight)
    assert torch.equal(packed.gather(torch.arange(4)), weight.bfloat16())


def test_memory_is_what_the_weights_need() -> None:
    """Only what pads N to 32 and K to a step is added."""
    for dtype in (torch.float32, torch.bfloat16):
        data = PackedMatrix(NATIVE, 576, 1536, dtype).data
        assert data.num_bytes == 576 * 1536 * dtype.itemsize


def test_make_linear_takes_tensors_and_packed_matrices() -> None:
    weight, x = random(6, 4, dtype=torch.float32), random(3, 4, dtype=torch.float32, seed=1)
    for matrix in (weight, PackedMatrix.of(NATIVE, weight)):
        got = make_linear(matrix, None)(x)
        torch.testing.assert_close(got, x @ weight.T)


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 5), "x has 5 columns, not 4"),
        (torch.zeros(4), "x must have 2 dimensions, not 1"),
        (torch.zeros(1, 2, 4), "x must have 2 dimensions, not 3"),
        (torch.zeros(2, 4, dtype=BF16), "x differs from the weight's type"),
        (torch.zeros(2, 4, dtype=torch.float64), "x must be float32 or bfloat16"),
        (torch.zeros(4, 2).T, "x must be contiguous in its last dimension; its stride is 2"),
    ],
)
def test_a_wrong_x_is_refused(x: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native(torch.zeros(6, 4))(x)


def test_a_wrong_out_is_refused() -> None:
    matrix = PackedMatrix.of(NATIVE, torch.zeros(6, 4)).data
    kernel = NATIVE.Linear(matrix, None, "scalar")
    with pytest.raises(ValueError, match=r"out must have shape \[3, 6\]"):
        kernel.run(torch.zeros(3, 4), torch.zeros(2, 6))
    with pytest.raises(ValueError, match="out has 5 columns, not 6"):
        kernel.run(torch.zeros(3, 4), torch.zeros(3, 5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PackedMatrix(NATIVE, 0, 4, F32), "0 rows and 4 columns"),
        (lambda: PackedMatrix(NATIVE, 4, 0, F32), "4 rows and 0 columns"),
        (lambda: PackedMatrix(NATIVE, 4, 4, torch.float16), "float16"),
        (lambda: PackedMatrix(NATIVE, 4, 3, F32).rows(0, 4).copy_(torch.zeros(4, 2)), r"\[4, 2\]"),
        (lambda: PackedMatrix(NATIVE, 4, 3, F32).rows(2, 3).copy_(torch.zeros(3, 3)), "2 to 5"),
        (lambda: PackedMatrix(NATIVE, 4, 3, F32).gather(torch.tensor([1, 4])), "row 4 is not"),
        (lambda: PackedMatrix(NATIVE, 4, 3, F32).gather(torch.tensor([-1])), "row -1 is not"),
        (lambda: NATIVE.PackedMatrix(4, 3, "int8"), "dtype='int8'"),
        (lambda: native(torch.zeros(4, 3), torch.zeros(5)), r"bias must have shape \[4\]"),
        (lambda: native(torch.zeros(4, 3), None, "sse9"), "isa 'sse9'"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_value(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
