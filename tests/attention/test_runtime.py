"""One OpenMP runtime in the process, torch's number of threads, and the fused activation."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tables import Rows, lay_out

from pagedkv.attention import make_backend
from pagedkv.attention.native import import_native

ISAS = pytest.mark.parametrize("isa", import_native().available_isas())


def in_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_kernels_share_the_openmp_runtime_of_torch() -> None:
    code = """
import pagedkv.attention.native as n
n.import_native().max_threads()
from threadpoolctl import threadpool_info
paths = [i["filepath"] for i in threadpool_info() if i["user_api"] == "openmp"]
print(len(paths), "torch" in paths[0])
"""
    assert in_new_process(code) == "1 True"


def test_set_num_threads_of_torch_is_honoured() -> None:
    native = import_native()
    case = lay_out(Rows.random([2000], 8, 2, 64, torch.float32), [1], 16)
    backend = make_backend("native", case.spec)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert native.max_threads() == threads
        assert native.count_threads() == threads
        assert backend.plan(case.batch).tasks.num_threads == threads


def test_little_work_wakes_no_second_thread() -> None:
    torch.set_num_threads(2)
    case = lay_out(Rows.random([10], 2, 1, 8, torch.float32), [1], 16)
    assert make_backend("native", case.spec).plan(case.batch).tasks.num_threads == 1


def test_isa_is_one_that_the_processor_has() -> None:
    native = import_native()
    assert native.isa() == native.available_isas()[-1]
    if native.isa() == "avx2":
        assert native.cpu_features()["avx2"] and native.cpu_features()["fma"]


@ISAS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul_equals_float64(dtype: torch.dtype, isa: str) -> None:
    gate_up = torch.linspace(-120, 120, 2 * 7 * 1501).roll(13).reshape(7, -1).to(dtype)
    out = torch.empty(7, 1501, dtype=dtype)
    import_native().silu_mul(gate_up, out, isa)
    gate, up = gate_up.double().chunk(2, dim=1)
    want = torch.nn.functional.silu(gate) * up
    rtol = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out.double(), want, rtol=rtol, atol=1e-30)


@ISAS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul_has_the_same_bits_wherever_an_element_stands(
    dtype: torch.dtype, isa: str
) -> None:
    native = import_native()
    gate_up = torch.randn(5, 2, 1101, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = torch.empty(5, 1101, dtype=dtype)
    native.silu_mul(gate_up.flatten(1), whole, isa)
    for row, begin, width in [(0, 0, 1), (1, 3, 7), (4, 1093, 8), (2, 1000, 101), (3, 1, 1100)]:
        part = gate_up[row, :, begin : begin + width].reshape(1, -1).contiguous()
        out = torch.empty(1, width, dtype=dtype)
        native.silu_mul(part, out, isa)
        assert torch.equal(out[0], whole[row, begin : begin + width])


@ISAS
def test_silu_mul_keeps_nan_and_does_not_overflow(isa: str) -> None:
    gate = torch.tensor([float("nan"), -1e30, 1e30, 0.0, float("inf")])
    out = torch.empty(1, 5)
    import_native().silu_mul(torch.cat([gate, torch.ones(5)])[None], out, isa)
    assert torch.isnan(out[0, 0])
    assert out[0, 1:].tolist() == [pytest.approx(0, abs=1e-6), gate[2].item(), 0.0, float("inf")]


def test_silu_mul_refuses_other_shapes_and_types() -> None:
    native = import_native()
    for gate_up, out in [
        (torch.zeros(2, 7), torch.zeros(2, 3)),
        (torch.zeros(2, 6), torch.zeros(2, 4)),
        (torch.zeros(2, 6), torch.zeros(2, 3, dtype=torch.bfloat16)),
        (torch.zeros(2, 6, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)),
        (torch.zeros(6, 2).T, torch.zeros(2, 3)),
    ]:
        with pytest.raises(ValueError):
            native.silu_mul(gate_up, out, "scalar")
    with pytest.raises(ValueError, match="isa 'avx1024' is not available"):
        native.silu_mul(torch.zeros(2, 6), torch.zeros(2, 3), "avx1024")
