"""The parts of the deterministic mode: a row's bits depend on that row alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from pagedkv.errors import ConfigError
from pagedkv.models import native
from pagedkv.models.activation import make_silu_mul
from pagedkv.models.config import RopeConfig
from pagedkv.models.decoder import rms_norm
from pagedkv.models.linear import make_linear
from pagedkv.models.rotary import Rotary, apply_rotary

MAX_ROWS = 70
COUNTS = (*range(1, 19), 31, 32, 33, 47, 48, 49, 64, MAX_ROWS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assert_rows_stand_alone(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """f over any rows in any order and company gives each the bits that it gets alone."""
    torch.set_num_threads(1)
    alone = torch.cat([f(x[i : i + 1]) for i in range(len(x))])
    generator = torch.Generator().manual_seed(0)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in COUNTS:
            chosen = torch.randperm(len(x), generator=generator)[:rows]
            assert torch.equal(f(x[chosen]), alone[chosen]), f"{rows} rows, {threads} threads"


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(576, 960), (1536, 576), (64, 128), (96, 64), (24, 17), (1, 1)]
)
def test_linear(dtype, inputs: int, outputs: int) -> None:
    weight = random(outputs, inputs, dtype=dtype, seed=1)
    for bias in (None, random(outputs, dtype=dtype, seed=2)):
        linear = make_linear(weight, bias, deterministic=True)
        assert_rows_stand_alone(linear, random(MAX_ROWS, inputs, dtype=dtype))


@DTYPES
def test_linear_computes_what_torch_computes(dtype) -> None:
    weight, bias = random(33, 40, dtype=dtype, seed=1), random(33, dtype=dtype, seed=2)
    for rows in (0, 1, 16, 17, 48):
        x = random(rows, 40, dtype=dtype)
        fixed, plain = (make_linear(weight, bias, deterministic=d)(x) for d in (True, False))
        assert fixed.shape == (rows, 33) and fixed.dtype == dtype
        torch.testing.assert_close(fixed, plain)


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


@DTYPES
@pytest.mark.parametrize("width", [1, 17, 80, 1500])
def test_silu_mul(dtype, width: int) -> None:
    silu_mul = make_silu_mul(deterministic=True)
    x = random(MAX_ROWS, 2 * width, dtype=dtype) * 4
    assert_rows_stand_alone(silu_mul, x)
    torch.testing.assert_close(silu_mul(x), make_silu_mul(deterministic=False)(x))


def test_without_the_native_extension_the_mode_is_refused(monkeypatch) -> None:
    def missing() -> None:
        raise ImportError("no module named pagedkv._native")

    monkeypatch.setattr(native, "import_native", missing)
    make_silu_mul(deterministic=False)
    with pytest.raises(ConfigError, match="deterministic=True needs the native extension"):
        make_silu_mul(deterministic=True)
