"""First fit against a plain map of slots, and the comparison with paging on small cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.errors import ConfigError
from pagedkv.simulation.allocators import compare
from pagedkv.simulation.contiguous import FirstFit
from pagedkv.simulation.trace import Trace
from pagedkv.simulation.workload import make_trace

SLOTS = 12


def holes_of(owners: list[int | None]) -> list[int]:
    """Sizes of the maximal runs of free slots."""
    runs = "".join("." if owner is None else "x" for owner in owners).split("x")
    return [len(run) for run in runs if run]


@given(st.lists(st.tuples(st.sampled_from(["take", "free", "compact"]), st.integers(1, 6))))
def test_first_fit_equals_a_plain_map(calls: list[tuple[str, int]]) -> None:
    pool, owners = FirstFit(SLOTS), [None] * SLOTS
    plain: list[int | None] = list(owners)
    for key, (call, n) in enumerate(calls):
        held = sorted({owner for owner in plain if owner is not None})
        if call == "take":
            starts = [s for s in range(SLOTS - n + 1) if set(plain[s : s + n]) == {None}]
            assert pool.allocate(key, n) == bool(starts)
            if starts:
                plain[starts[0] : starts[0] + n] = [key] * n
        elif call == "free" and held:
            pool.free(held[n % len(held)])
            plain = [None if owner == held[n % len(held)] else owner for owner in plain]
        elif call == "compact":
            packed = [owner for owner in plain if owner is not None]
            packed += [None] * (SLOTS - len(packed))
            moved = {b for a, b in zip(plain, packed, strict=True) if a != b and b is not None}
            assert set(pool.compact()) == {k for k in moved if plain.index(k) != packed.index(k)}
            plain = packed
        assert pool.holes == holes_of(plain)
        assert pool.free_slots == plain.count(None)


def make(requests: list[tuple[int, int, float]]) -> Trace:
    prompts, outputs, arrivals = zip(*requests, strict=True)
    return Trace(np.array(arrivals), np.array(prompts), np.array(outputs), None, None, None)


def test_a_hole_too_small_refuses_and_compaction_moves() -> None:
    # Three of 4 slots in a pool of 16; the one in the middle ends first, and 8 are wanted.
    trace = make([(1, 3, 0), (3, 1, 0), (1, 3, 0), (6, 2, 0)])
    reports = compare(trace, 16, block_size=4, step_seconds=1.0)
    exact, packed = reports["oracle"], reports["oracle, compacting"]
    assert exact["refused_while_free_sufficed"] > 0
    assert exact["tokens_moved"] == 0
    assert packed["refused_while_free_sufficed"] == 0
    assert packed["steps"] <= exact["steps"]
    assert reports["paged"]["refused_while_free_sufficed"] == 0


def test_a_lone_request_by_hand() -> None:
    reports = compare(make([(3, 2, 0)]), 16, block_size=4, max_length=8, step_seconds=1.0)
    # Live 3, then 4 of 16 slots; one block, 8 slots, 3 + 2, and 3 + 2 reserved.
    for name, reserved in (("paged", 4), ("max", 8), ("pow2", 5), ("oracle", 5)):
        report = reports[name]
        assert report["utilisation"] == pytest.approx(7 / 32), name
        assert report["internal_waste"] == pytest.approx((2 * reserved - 7) / 32), name
        assert (report["steps"], report["peak_resident"]) == (2, 1)


def test_a_shortage_of_blocks_drops_and_restores_the_last() -> None:
    reports = compare(make([(4, 4, 0), (4, 4, 0)]), 12, block_size=4, step_seconds=1.0)
    assert reports["paged"]["tokens_restored"] == 4
    assert reports["paged"]["never_fit"] == 0
    assert reports["max"]["tokens_restored"] == 0


def test_all_requests_end_and_paging_holds_most() -> None:
    trace = make_trace(300, 2.0, 60, 40, seed=1)
    reports = compare(trace, 2000)
    assert all(report["never_fit"] == 0 for report in reports.values())
    best = max(reports, key=lambda name: reports[name]["utilisation"])
    assert best == "paged"
    assert reports["paged"]["steps"] < reports["max"]["steps"]


def test_what_never_fits_is_counted() -> None:
    reports = compare(make([(30, 2, 0), (3, 2, 0)]), 16, block_size=4, max_length=4)
    assert reports["paged"]["never_fit"] == 1
    assert reports["max"]["never_fit"] == 2  # 5 tokens pass a reservation of 4


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"num_slots": 3}, "num_slots=3: give a block of 16"),
        ({"num_slots": 64, "block_size": 0}, "block_size=0"),
        ({"num_slots": 64, "seats": 0}, "seats=0"),
        ({"num_slots": 64, "step_seconds": 0.0}, "step_seconds=0.0"),
        ({"num_slots": 64, "max_length": 0}, "max_length=0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(settings: dict[str, int], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        compare(make([(3, 2, 0)]), **settings)
