"""Blocks that several rows have in common are read once for all of them, and no bit changes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from tables import Case, Rows, attend, lay_out
from test_determinism import DTYPES, SHAPES, assert_same_bits, native, pick

from pagedkv.attention import make_backend
from pagedkv.attention.native import NativeBackend, import_native

SPAN = 128  # positions that the native kernel accumulates on their own
TILE = 48  # query vectors of a K/V head that share one pass over a span
Forest = dict[int, tuple[int, int]]  # row -> (row of which it has leading positions, how many)


def share(rows: Rows, query_lens: list[int], forest: Forest, block_size: int) -> Case:
    """Rows laid out with the common leading blocks of `forest`; what they replace becomes NaN.

    The content of `rows` is made equal where they share. A row comes after those it leads back to.
    """
    for row, (other, common) in forest.items():
        for part in (rows.k, rows.v):
            part[row][:common] = part[other][:common]
    case = lay_out(rows, query_lens, block_size)
    for row, (other, common) in forest.items():
        assert common <= min(len(rows.q[i]) - query_lens[i] for i in (row, other))
        table, count = case.batch.tables[row], common // block_size
        case.blocks[table[:count]] = float("nan")
        table[:count] = case.batch.tables[other, :count]
    return case


def fill(case: Case, isa: str | None = None) -> NativeBackend:
    backend = make_backend("native", case.spec, deterministic=True, isa=isa)
    assert isinstance(backend, NativeBackend)
    backend.write_blocks(np.arange(case.spec.num_blocks + 1, dtype=np.int32), case.blocks)
    return backend


def expected_spans(case: Case) -> int:
    """Spans, each counted once a set of rows that agree on every block up to its end."""
    batch, group = case.batch, case.spec.num_heads // case.spec.num_kv_heads
    seen: Counter[tuple[int, bytes]] = Counter()
    for new, context, table in zip(batch.query_lens, batch.context_lens, batch.tables, strict=True):
        if new * group < TILE:
            for span in range((context - new) // SPAN):
                blocks = -(-(span + 1) * SPAN // case.spec.block_size)
                seen[span, table[:blocks].tobytes()] += 1
    return sum(count > 1 for count in seen.values())


TREE_LENGTHS = [700, 641, 390, 515, 300, 129, 700, 20]
TREE: Forest = {1: (0, 640), 2: (1, 256), 3: (1, 512), 4: (2, 256), 6: (5, 128)}


@pytest.mark.parametrize("isa", import_native().available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_size", [1, 16, 64, 128])
def test_shared_rows_have_the_bits_of_their_solo_runs(
    shape: tuple[int, int, int], dtype: torch.dtype, isa: str, block_size: int
) -> None:
    rows = Rows.random(TREE_LENGTHS, *shape, dtype)
    query_lens = [1, 1, 5, 3, 1, 1, 100, 20]
    case = share(rows, query_lens, TREE, block_size)
    backend = fill(case, isa)
    plan = backend.plan(case.batch)
    assert plan.num_shared_spans == expected_spans(case) > 2
    got = backend.run(plan, 0, case.q, case.k, case.v).split(query_lens)
    for i, new in enumerate(query_lens):
        assert_same_bits(got[i], native(pick(rows, [i]), [new], isa=isa)[0])


@pytest.mark.parametrize("seed", range(24))
def test_any_forest_is_found_and_changes_no_bit(seed: int) -> None:
    draw = np.random.default_rng(seed)
    block_size = int(draw.choice([1, 3, 16, 32, 200]))
    count = int(draw.integers(2, 24))
    lengths = draw.integers(1, 700, count).tolist()
    query_lens = [
        int(draw.integers(1, min(n, 1 + 8 * (i % 3 == 0)) + 1)) for i, n in enumerate(lengths)
    ]
    forest: Forest = {}
    for row in range(1, count):
        other = int(draw.integers(0, row))
        both = min(lengths[i] - query_lens[i] for i in (row, other)) // block_size
        if draw.random() < 0.9:
            forest[row] = other, int(draw.integers(0, both + 1)) * block_size
    rows = Rows.random(lengths, 6, 2, 16, torch.float32, seed)
    case = share(rows, query_lens, forest, block_size)
    backend = fill(case)
    alone = backend.plan(case.batch, share=False)
    assert alone.num_shared_spans == 0
    want = backend.run(alone, 0, case.q, case.k, case.v)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        plan = backend.plan(case.batch)
        assert plan.num_shared_spans == expected_spans(case)
        assert_same_bits(backend.run(plan, 0, case.q, case.k, case.v), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_fill_a_tile_over_a_long_prefix(dtype: torch.dtype) -> None:
    count, prefix = 37, 1024
    rows = Rows.random([prefix + 1 + i for i in range(count)], 9, 3, 64, dtype)
    case = share(rows, [1] * count, dict.fromkeys(range(1, count), (0, prefix)), 16)
    want = attend(make_backend("reference", case.spec), case)
    backend = fill(case)
    alone = backend.run(backend.plan(case.batch, share=False), 0, case.q, case.k, case.v)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        plan = backend.plan(case.batch)
        assert plan.num_shared_spans == prefix // SPAN
        got = backend.run(plan, 0, case.q, case.k, case.v)
        assert_same_bits(got, alone)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


def test_the_counter_shows_what_was_shared() -> None:
    rows = Rows.random([300, 300, 300], 2, 1, 8, torch.float32)
    for forest, spans in (
        ({}, 0),
        ({1: (0, 112)}, 0),  # less than a span
        ({1: (0, 128)}, 1),
        ({1: (0, 256), 2: (0, 256)}, 2),
        ({1: (0, 256), 2: (0, 128)}, 2),
        ({2: (1, 288)}, 2),  # the rest of a span is each row's own
    ):
        case = share(rows, [1, 1, 1], forest, 16)
        backend = fill(case)
        assert backend.shared_spans == 0
        assert backend.plan(case.batch).num_shared_spans == spans
        backend.plan(case.batch)
        backend.plan(case.batch, share=False)
        assert backend.shared_spans == 2 * spans


def test_blocks_in_common_after_a_different_one_are_not_a_prefix() -> None:
    rows = Rows.random([300, 300], 2, 1, 8, torch.float32)
    case = share(rows, [1, 1], {1: (0, 256)}, 16)
    case.batch.tables[1, 3] = case.batch.tables[0, 4]
    backend = fill(case)
    plan = backend.plan(case.batch)
    assert plan.num_shared_spans == 0
    want = attend(make_backend("reference", case.spec), case)
    got = backend.run(plan, 0, case.q, case.k, case.v)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("part", ["q", "k"])
def test_nan_of_a_row_stays_in_that_row(part: str) -> None:
    rows = Rows.random([300, 300, 290], 6, 2, 16, torch.float32)
    case = share(rows, [1, 4, 1], {1: (0, 256), 2: (0, 256)}, 16)
    backend = fill(case)
    plan = backend.plan(case.batch)
    clean = backend.run(plan, 0, case.q, case.k, case.v)
    getattr(case, part)[0] = float("nan")  # the token of row 0
    poisoned = backend.run(plan, 0, case.q, case.k, case.v)
    assert plan.num_shared_spans == 2
    assert torch.isnan(poisoned[0]).all()
    assert_same_bits(poisoned[1:], clean[1:])


def test_control_a_shared_block_reaches_all_its_rows_and_no_other() -> None:
    """Without this the equalities above could hold because the shared part does not matter."""
    rows = Rows.random([300, 300, 300], 4, 2, 32, torch.float32)
    case = share(rows, [1, 1, 1], {1: (0, 256)}, 16)
    backend = fill(case)
    plan = backend.plan(case.batch)
    want = backend.run(plan, 0, case.q, case.k, case.v)
    block = case.batch.tables[0, 5:6]
    backend.write_blocks(block, torch.zeros_like(backend.read_blocks(block)))
    changed = (backend.run(plan, 0, case.q, case.k, case.v) - want).abs().amax(dim=(1, 2))
    assert (changed[:2] > 100 * 1e-5).all() and changed[2] == 0


def test_a_plan_of_one_row_or_of_short_rows_shares_nothing() -> None:
    case = lay_out(Rows.random([9], 2, 1, 8, torch.float32), [1], 4)
    assert fill(case).plan(case.batch).num_shared_spans == 0
    case = lay_out(Rows.random([9, 9], 2, 1, 8, torch.float32), [1, 1], 4)
    case.batch.tables[1, :2] = case.batch.tables[0, :2]
    assert fill(case).plan(case.batch).num_shared_spans == 0
