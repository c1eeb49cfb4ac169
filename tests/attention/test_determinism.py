"""The bits of a row's result depend on q and on K, V of its positions, on nothing else."""

from __future__ import annotations

import pytest
import torch
from tables import Rows, attend, lay_out

from pagedkv.attention import make_backend
from pagedkv.attention.native import import_native

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(9, 3, 64), (4, 4, 40), (5, 1, 16)]
LENGTHS = [1, 17, 128, 129, 300]


def native(
    rows: Rows,
    query_lens: list[int],
    block_size: int = 16,
    *,
    seed: int = 0,
    isa: str | None = None,
) -> list[torch.Tensor]:
    """Results of the new tokens, one tensor a row."""
    case = lay_out(rows, query_lens, block_size, seed=seed)
    backend = make_backend("native", case.spec, deterministic=True, isa=isa)
    return list(attend(backend, case).split(query_lens))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.isfinite(want).all()
    assert torch.equal(bits(got), bits(want))


def random_rows(shape: tuple[int, int, int], dtype: torch.dtype) -> Rows:
    return Rows.random(LENGTHS, *shape, dtype)


def pick(rows: Rows, indices: list[int]) -> Rows:
    return Rows(*([part[i] for i in indices] for part in (rows.q, rows.k, rows.v)))


@pytest.mark.parametrize("isa", import_native().available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_for_every_block_size(
    shape: tuple[int, int, int], dtype: torch.dtype, isa: str
) -> None:
    rows = random_rows(shape, dtype)
    want = native(rows, LENGTHS, 16, isa=isa)
    for block_size in (1, 3, 64, 512):
        got = native(rows, LENGTHS, block_size, seed=block_size, isa=isa)
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("isa", import_native().available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_for_every_chunking(
    shape: tuple[int, int, int], dtype: torch.dtype, isa: str
) -> None:
    rows = random_rows(shape, dtype)
    for i, length in enumerate(LENGTHS):
        row = pick(rows, [i])
        want = native(row, [length], isa=isa)[0]
        for new in (1, 2, 3, 16, 100):
            if new <= length:
                assert_same_bits(native(row, [new], isa=isa)[0], want[length - new :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_in_every_batch_and_position(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    rows = random_rows(shape, dtype)
    alone = [native(pick(rows, [i]), [n])[0] for i, n in enumerate(LENGTHS)]
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4], [4] * 9 + [1]):
        for new in (1, 20):
            query_lens = [min(new, LENGTHS[i]) for i in order]
            for i, got in zip(order, native(pick(rows, order), query_lens), strict=True):
                assert_same_bits(got, alone[i][-len(got) :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_for_every_number_of_threads(dtype: torch.dtype) -> None:
    rows = Rows.random([2000, 700], 9, 3, 64, dtype)
    split_somewhere = False
    for query_lens in ([1, 1], [30, 1]):
        results = []
        items = set()
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            case = lay_out(rows, query_lens, 16)
            backend = make_backend("native", case.spec)
            results.append(attend(backend, case))
            items.add(backend.plan(case.batch).tasks.num_items)
        split_somewhere |= len(items) > 1
        assert_same_bits(results[1], results[0])
        assert_same_bits(results[2], results[0])
    assert split_somewhere  # else the merge over threads was not tested


def test_nan_of_an_earlier_step_pads_no_keys_when_the_scratch_has_grown() -> None:
    """What is not packed in blocks is packed in scratch, of which more threads need more."""
    for dim in (1, 2, 3, 5, 10, 12):
        torch.set_num_threads(1)
        case = lay_out(Rows.random([130], 1, 1, dim, torch.float32), [130], 5)
        backend = make_backend("native", case.spec)
        want = attend(backend, case)
        nan = torch.full_like(case.k, float("nan"))
        for threads in (2, 3, 4):
            backend.run(backend.plan(case.batch), 0, case.q, nan, nan)
            torch.set_num_threads(threads)
            assert_same_bits(attend(backend, case), want)


def test_nan_in_one_row_stays_in_that_row_and_in_later_positions() -> None:
    rows = Rows.random([40, 40], 2, 1, 8, torch.float32)
    clean = native(rows, [40, 40])
    rows.k[0][20] = float("nan")
    rows.v[0][20] = float("nan")
    poisoned = native(rows, [40, 40])
    assert_same_bits(poisoned[0][:20], clean[0][:20])
    assert torch.isnan(poisoned[0][20:]).all()
    assert_same_bits(poisoned[1], clean[1])


@pytest.mark.parametrize("change", ["swap two blocks", "shift a position", "zero a slot"])
def test_control_a_wrong_table_changes_the_bits(change: str) -> None:
    """Without this the equalities above could hold because attention does not matter."""
    rows = Rows.random([64], 4, 2, 32, torch.float32)
    want = native(rows, [1])[0]
    k, v = rows.k[0].clone(), rows.v[0].clone()
    if change == "swap two blocks":  # the keys of one block with the values of the other
        v[0:16], v[16:32] = rows.v[0][16:32], rows.v[0][0:16]
    elif change == "shift a position":
        v[:-1] = rows.v[0][1:]
    else:
        k[30], v[30] = 0, 0
    changed = native(Rows(rows.q, [k], [v]), [1])[0]
    assert (changed - want).abs().max() > 100 * 1e-5
