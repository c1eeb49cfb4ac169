"""Native and gather against the float64 reference, with everything unwritten set to NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tables import Case, Rows, attend, lay_out

from pagedkv.attention import AttentionBackend, AttentionBatch, make_backend
from pagedkv.attention.native import import_native

ISAS = import_native().available_isas()
BACKENDS = ["gather", *(f"native-{isa}" for isa in ISAS)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SPAN = 128  # positions that the native kernel accumulates on their own


def make(name: str, case: Case, scale: float | None = None) -> AttentionBackend:
    base, _, isa = name.partition("-")
    return make_backend(base, case.spec, scale=scale, isa=isa or None)


def expected(case: Case, scale: float | None = None) -> torch.Tensor:
    return attend(make_backend("reference", case.spec, scale=scale), case)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.isfinite(want).all()
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[want.dtype])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(2, 2, 8), (9, 3, 64), (4, 1, 80), (6, 6, 128), (4, 2, 256), (71, 1, 16), (2, 1, 12)],
)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_ragged_batch_of_chunks_and_decodes_equals_reference(
    name: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block_size: int
) -> None:
    lengths = [1, block_size, block_size + 1, 3 * block_size, 37, 2 * SPAN + 5]
    query_lens = [1, block_size, 1, 2, 20, 1]
    rows = Rows.random(lengths, heads, kv_heads, dim, dtype, seed=block_size)
    case = lay_out(rows, query_lens, block_size, seed=dim)
    assert_close(attend(make(name, case), case), expected(case))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 4])
def test_decode_rows_of_like_length_see_nothing_past_their_ends(name: str, block_size: int) -> None:
    """What one call has to pad is neither attended to nor read: unwritten slots are NaN."""
    rows = Rows.random([5, 7, 6, 7], 4, 2, 16, torch.float32)
    case = lay_out(rows, [1, 1, 1, 1], block_size)
    assert_close(attend(make(name, case), case), expected(case))


@pytest.mark.parametrize("name", BACKENDS)
def test_chunk_across_spans_equals_reference(name: str) -> None:
    rows = Rows.random([3 * SPAN], 6, 2, 32, torch.float32)
    case = lay_out(rows, [2 * SPAN + 7], 16)
    assert_close(attend(make(name, case), case), expected(case))


@pytest.mark.parametrize("name", BACKENDS)
def test_given_scale_is_used(name: str) -> None:
    case = lay_out(Rows.random([9, 30], 4, 2, 16, torch.float32), [9, 1], 4)
    got, want = attend(make(name, case, scale=0.7), case), expected(case, scale=0.7)
    assert_close(got, want)
    assert (want - expected(case)).abs().max() > 1e-2


@pytest.mark.parametrize("name", BACKENDS)
def test_scores_far_apart_do_not_overflow(name: str) -> None:
    rows = Rows.random([200], 2, 1, 8, torch.float32)
    rows.q[0] *= 100
    case = lay_out(rows, [200], 16)
    got, want = attend(make(name, case), case), expected(case)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_whose_rounding_is_past_all_exponents(name: str, dtype: torch.dtype) -> None:
    """At 1e12 a score's last bit is worth more powers of two than float32 has."""
    rows = Rows.random([200], 2, 1, 8, dtype)
    rows.q[0] *= 1e12
    case = lay_out(rows, [200], 16)
    assert_close(attend(make(name, case), case), expected(case))


@pytest.mark.parametrize("name", BACKENDS)
def test_every_length_and_hit_length_has_the_same_answer(name: str) -> None:
    """Only one residue modulo the block size goes wrong (sglang PR#29633)."""
    block_size = 4
    for length in range(1, 4 * block_size + 1):
        rows = Rows.random([length], 2, 1, 8, torch.float32, seed=length)
        whole = expected(lay_out(rows, [length], block_size))
        for new in range(1, length + 1):
            case = lay_out(rows, [new], block_size, seed=new)
            assert_close(attend(make(name, case), case), whole[length - new :])


@pytest.mark.parametrize("name", BACKENDS)
def test_slots_of_second_and_later_rows_are_not_misread(name: str) -> None:
    """Slot lists padded without page alignment: later requests read wrong slots (sglang-jax#20)."""
    rows = Rows.random([5, 6, 7], 2, 1, 8, torch.float32)
    together = lay_out(rows, [5, 6, 7], 4)
    got = attend(make(name, together), together).split([5, 6, 7])
    for i in range(3):
        alone = lay_out(Rows([rows.q[i]], [rows.k[i]], [rows.v[i]]), [5 + i], 4)
        assert_close(got[i], expected(alone))


@pytest.mark.parametrize("name", BACKENDS)
def test_rows_shorter_than_one_block_are_not_zero(name: str) -> None:
    """Sequences shorter than a page give zeros for the second request (flashinfer#725, #320)."""
    case = lay_out(Rows.random([1, 1, 2], 2, 1, 8, torch.float32), [1, 1, 2], 16)
    got = attend(make(name, case), case)
    assert_close(got, expected(case))
    assert (got.abs().amax(dim=(1, 2)) > 0).all()


@pytest.mark.parametrize("name", BACKENDS)
def test_hit_and_miss_in_one_step_equal_their_solo_runs(name: str) -> None:
    """A prefill batch with one cache hit loses its block table (tanishqkumar/ssd#23)."""
    rows = Rows.random([20, 11], 4, 2, 16, torch.float32)
    together = lay_out(rows, [4, 11], 4)
    got = attend(make(name, together), together).split([4, 11])
    for i, new in enumerate([4, 11]):
        alone = lay_out(Rows([rows.q[i]], [rows.k[i]], [rows.v[i]]), [new], 4, seed=7)
        assert_close(got[i], expected(alone))


@pytest.mark.parametrize("name", BACKENDS)
def test_plan_keeps_its_own_table_when_the_caller_reuses_the_buffer(name: str) -> None:
    """A reused host buffer gives a kernel another batch's blocks (TensorRT-LLM PR#15546)."""
    case = lay_out(Rows.random([9, 6], 2, 1, 8, torch.float32), [1, 6], 4)
    want = expected(case)
    backend = make(name, case)
    backend.write_blocks(np.arange(case.spec.num_blocks + 1, dtype=np.int32), case.blocks)
    plan = backend.plan(case.batch)
    for array in (case.batch.tables, case.batch.slots, case.batch.context_lens):
        array[...] = 1
    case.batch.query_lens[...] = 1
    assert_close(backend.run(plan, 0, case.q, case.k, case.v), want)


@pytest.mark.parametrize("name", BACKENDS)
def test_two_plans_alive_do_not_share_tables(name: str) -> None:
    """As above, for a second step planned before the first runs (TensorRT-LLM PR#15546)."""
    case = lay_out(Rows.random([9, 300], 2, 1, 8, torch.float32), [1, 1], 4)
    want = expected(case)
    backend = make(name, case)
    backend.write_blocks(np.arange(case.spec.num_blocks + 1, dtype=np.int32), case.blocks)
    first = backend.plan(case.batch)
    other = case.batch
    backend.plan(
        AttentionBatch(
            other.query_lens[:1], other.context_lens[:1], other.tables[:1], other.slots[:1]
        )
    )
    assert_close(backend.run(first, 0, case.q, case.k, case.v), want)


@pytest.mark.parametrize("name", BACKENDS)
def test_padding_of_the_table_is_never_read_or_written(name: str) -> None:
    """Padding tokens read and write one trash slot in a tiny pool (transformers PR#46765)."""
    case = lay_out(Rows.random([5, 3], 2, 1, 8, torch.float32), [5, 1], 4, extra_width=8)
    backend = make(name, case)
    assert_close(attend(backend, case), expected(case))
    assert torch.isnan(backend.read_blocks(np.array([0], np.int32))).all()


@pytest.mark.parametrize("name", BACKENDS)
def test_only_the_planned_slots_are_written(name: str) -> None:
    case = lay_out(Rows.random([5, 7], 2, 1, 8, torch.float32), [2, 1], 4)
    backend = make(name, case)
    attend(backend, case)
    after = backend.read_blocks(np.arange(case.spec.num_blocks + 1, dtype=np.int32))
    want = case.blocks.clone()
    for token, slot in enumerate(case.batch.slots.tolist()):
        want[slot // 4, 0, 0, slot % 4] = case.k[token]
        want[slot // 4, 0, 1, slot % 4] = case.v[token]
    torch.testing.assert_close(after, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", BACKENDS)
def test_layers_do_not_mix(name: str) -> None:
    case = lay_out(Rows.random([6], 2, 1, 8, torch.float32), [6], 4)
    spec = case.spec
    case.spec = type(spec)(
        3, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.num_blocks, 4, spec.dtype
    )
    backend = make(name, case)
    plan = backend.plan(case.batch)
    outs = [backend.run(plan, layer, case.q, case.k * layer, case.v + layer) for layer in range(3)]
    again = [backend.run(plan, layer, case.q, case.k * layer, case.v + layer) for layer in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(outs, again, strict=True))
    stored = backend.read_blocks(case.batch.tables[0, :1])
    for layer in range(3):
        assert torch.equal(stored[0, layer, 1], case.v[:4] + layer)


@pytest.mark.parametrize("name", BACKENDS)
def test_views_of_a_fused_projection_are_read_by_their_strides(name: str) -> None:
    case = lay_out(Rows.random([6, 9], 4, 2, 8, torch.float32), [6, 1], 4)
    want = attend(make(name, case), case)
    fused = torch.cat([case.q, case.k, case.v], dim=1)
    case.q, case.k, case.v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    assert not case.k.is_contiguous()
    assert torch.equal(attend(make(name, case), case), want)


def test_scalar_path_is_built_and_differs_from_the_vector_path_in_rounding_only() -> None:
    assert ISAS[0] == "scalar"
    case = lay_out(Rows.random([50], 2, 1, 64, torch.float32), [50], 16)
    scalar = attend(make("native-scalar", case), case)
    best = attend(make("native", case), case)
    torch.testing.assert_close(scalar, best, rtol=0, atol=2e-6)
