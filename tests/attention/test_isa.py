"""One build runs on every machine: the scalar path is always there, the best one is chosen here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tables import Rows, attend, lay_out, spec_of

from pagedkv.attention import make_backend
from pagedkv.attention.native import NativeBackend, import_native
from pagedkv.errors import ConfigError

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def test_illegal_instruction_the_path_is_one_that_this_machine_has() -> None:
    """vllm#4542, #13662, llama.cpp#8734, ipex-llm#12922: AVX2 or AVX-512 was taken for granted."""
    native = import_native()
    available = native.available_isas()
    assert available[0] == "scalar"
    features = native.cpu_features()
    assert ("avx2" not in available) or (features["avx2"] and features["fma"])
    assert ("avx512" not in available) or (features["avx512f"] and features["avx512vl"])
    assert ("avx512bf16" not in available) or features["avx512bf16"]
    backend = make_backend("native", spec_of())
    assert isinstance(backend, NativeBackend) and backend.isa == available[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 40), (2, 2, 256)])
def test_illegal_instruction_the_baseline_gives_the_results_of_the_best_path(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    """vllm#4542, llama.cpp#8734: the path without vector instructions has to exist and be right."""
    case = lay_out(Rows.random([1, 37, 300], heads, kv_heads, dim, dtype), [1, 20, 1], 16)
    scalar = attend(make_backend("native", case.spec, isa="scalar"), case)
    best = attend(make_backend("native", case.spec), case)
    assert torch.isfinite(scalar).all() and scalar.abs().max() > 0.1
    torch.testing.assert_close(scalar, best, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 40), (2, 2, 256)])
def test_wider_registers_change_no_bit(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    if "avx512" not in import_native().available_isas():
        pytest.skip("this machine has no AVX-512")
    case = lay_out(Rows.random([1, 37, 300], heads, kv_heads, dim, dtype), [1, 20, 100], 16)
    narrow = attend(make_backend("native", case.spec, isa="avx2"), case)
    wide = attend(make_backend("native", case.spec, isa="avx512"), case)
    assert narrow.abs().max() > 0.1 and torch.equal(narrow, wide)
    # Pairs of bfloat16 have an instruction of their own, and bits of their own; float32 has none.
    best = attend(make_backend("native", case.spec), case)
    assert dtype == torch.bfloat16 or torch.equal(best, wide)


def test_illegal_instruction_what_is_missing_is_named_before_anything_runs() -> None:
    """vllm#13662, ipex-llm#12922: the process died instead of saying what the CPU lacks."""
    with pytest.raises(ConfigError, match=r"isa='avx1024': this machine and build have .*scalar"):
        make_backend("native", spec_of(), isa="avx1024")
    for name in ("native", "gather", "reference"):
        with pytest.raises(ConfigError, match=r"float16.*float32.*bfloat16"):
            make_backend(name, replace(spec_of(), dtype=torch.float16))
