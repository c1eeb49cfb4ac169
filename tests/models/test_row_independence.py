"""The parts of the deterministic mode: a row's bits depend on that row alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from pagedkv.attention.native import import_native
from pagedkv.errors import ConfigError
from pagedkv.models import native
from pagedkv.models.config import RopeConfig
from pagedkv.models.decoder import rms_norm
from pagedkv.models.linear import NativeLinear
from pagedkv.models.packed import PackedMatrix
from pagedkv.models.rotary import Rotary, apply_rotary

MAX_ROWS = 70
COUNTS = (*range(1, 19), 31, 32, 33, 47, 48, 49, 64, MAX_ROWS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assert_rows_stand_alone(
    f: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    counts: Iterable[int] = COUNTS,
    threads: Iterable[int] = (1, 2),
) -> None:
    """f over any rows in any order and company gives each the bits that it gets alone."""
    torch.set_num_threads(1)
    alone = torch.cat([f(x[i : i + 1]) for i in range(len(x))])
    generator = torch.Generator().manual_seed(0)
    for number in threads:
        torch.set_num_threads(number)
        for rows in counts:
            chosen = torch.randperm(len(x), generator=generator)[:rows]
            assert torch.equal(f(x[chosen]), alone[chosen]), f"{rows} rows, {number} threads"


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed_linear(weight: torch.Tensor) -> NativeLinear:
    return NativeLinear(PackedMatrix.of(import_native(), weight))


@DTYPES
@pytest.mark.parametrize("isa", import_native().available_isas())
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(1, 1), (7, 63), (63, 7), (577, 33), (700, 65), (64, 577)]
)
def test_linear(dtype, isa: str, inputs: int, outputs: int) -> None:
    """Inputs past 256 and 512 end a chunk; outputs past 32 a panel."""
    weight = PackedMatrix.of(import_native(), random(outputs, inputs, dtype=dtype, seed=1))
    linear = NativeLinear(weight, random(outputs, dtype=dtype, seed=2), isa)
    counts = range(1, MAX_ROWS + 1)
    assert_rows_stand_alone(
        linear, random(MAX_ROWS, inputs, dtype=dtype), counts=counts, threads=(1, 2, 3)
    )


@DTYPES
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (1536, 576)])
def test_linear_of_the_embedded_model(dtype, inputs: int, outputs: int) -> None:
    linear = packed_linear(random(outputs, inputs, dtype=dtype, seed=1))
    assert_rows_stand_alone(linear, random(MAX_ROWS, inputs, dtype=dtype))


@DTYPES
def test_linear_of_many_rows(dtype) -> None:
    """A prefill is divided among threads by rows as well, and shares panels in groups."""
    linear = packed_linear(random(1100, 300, dtype=dtype, seed=1))
    x = random(401, 300, dtype=dtype)
    torch.set_num_threads(3)
    whole = linear(x)
    for start in (0, 1, 200, 388):
        assert torch.equal(linear(x[start : start + 13]), whole[start : start + 13])


@DTYPES
@pytest.mark.parametrize("shape", [(576,), (64,), (3, 24), (1,), (5000,)])
def test_rms_norm(dtype, shape: tuple[int, ...]) -> None:
    weight = random(shape[-1], dtype=dtype, seed=1)
    assert_rows_stand_alone(
        lambda x: rms_norm(x, weight, 1e-5), random(MAX_ROWS, *shape, dtype=dtype)
    )


@DTYPES
def test_rms_norm_of_heads_inside_a_wider_tensor(dtype) -> None:
    """Queries and keys are normalised as slices of the fused projection."""
    weight = random(24, dtype=dtype, seed=1)
    assert_rows_stand_alone(
        lambda x: rms_norm(x[:, 4:6], weight, 1e-5), random(MAX_ROWS, 8, 24, dtype=dtype)
    )


@DTYPES
@pytest.mark.parametrize("head_dim", [2, 24, 64])
def test_rotary(dtype, head_dim: int) -> None:
    rotary = Rotary(RopeConfig(10000.0), head_dim, 200)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        positions = x[:, 0, 0].float().abs().mul(50).long()
        return apply_rotary(x, *rotary.at(positions))

    assert_rows_stand_alone(rotate, random(MAX_ROWS, 3, head_dim, dtype=dtype))


@pytest.fixture
def not_built(monkeypatch) -> Callable[[], None]:
    """Call it to be without the native extension for the rest of the test."""

    def missing() -> None:
        raise ImportError("no module named pagedkv._native")

    return lambda: monkeypatch.setattr(native, "import_native", missing)


def test_without_the_native_extension_the_mode_is_refused(not_built) -> None:
    not_built()
    assert native.find_native(deterministic=False) is None
    with pytest.raises(ConfigError, match="deterministic=True needs the native extension"):
        native.find_native(deterministic=True)
