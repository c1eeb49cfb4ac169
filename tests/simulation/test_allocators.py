"""First fit against a plain map of slots, and the comparison with paging on small cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.errors import ConfigError
from pagedkv.simulation.account import Account
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
    # Two steps with 8 of 16 slots free, in holes of 4.
    assert exact["external_waste"] == pytest.approx(2 * 8 / (16 * exact["steps"]))
    assert packed["external_waste"] == reports["paged"]["external_waste"] == 0
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


def test_a_shortage_can_cost_a_block_alone() -> None:
    # Two of 8 tokens in 5 blocks of 4: the first takes the last block, the second finds none.
    reports = compare(make([(8, 4, 0), (8, 4, 0)]), 20, block_size=4, step_seconds=1.0)
    whole, partial = reports["paged"], reports["paged, partial"]
    assert (whole["shortages"], whole["tokens_restored"]) == (1, 8)
    assert (partial["shortages"], partial["tokens_restored"]) == (1, 4)
    assert whole["steps"] == partial["steps"]


def test_a_request_that_waits_gives_one_block_after_the_other() -> None:
    # In 6 blocks of 4 both grow to 12 tokens; the first needs two more and gets them one by one.
    reports = compare(make([(8, 12, 0), (8, 8, 0)]), 24, block_size=4, step_seconds=1.0)
    whole, partial = reports["paged"], reports["paged, partial"]
    assert (whole["shortages"], whole["tokens_restored"], whole["steps"]) == (1, 12, 16)
    assert (partial["shortages"], partial["tokens_restored"], partial["steps"]) == (2, 8, 16)


def test_what_a_request_has_kept_helps_it_back() -> None:
    # In 6 blocks of 4 the third loses one of two; when the second ends, two more are enough.
    trace = make([(8, 4, 0), (2, 2, 0), (8, 4, 0)])
    partial = compare(trace, 24, block_size=4, step_seconds=1.0)["paged, partial"]
    assert (partial["tokens_restored"], partial["steps"]) == (4, 6)


def test_partial_drops_restore_less_and_end_alike() -> None:
    trace = make_trace(300, 20.0, 60, 40, seed=1)
    reports = compare(trace, 1200)
    whole, partial = reports["paged"], reports["paged, partial"]
    assert partial["tokens_restored"] < whole["tokens_restored"] / 2
    assert partial["never_fit"] == whole["never_fit"] == 0


def test_compaction_is_counted_as_a_shortage() -> None:
    trace = make([(1, 3, 0), (3, 1, 0), (1, 3, 0), (6, 2, 0)])
    packed = compare(trace, 16, block_size=4, step_seconds=1.0)["oracle, compacting"]
    assert packed["shortages"] == 1
    assert packed["tokens_moved"] == 2  # the third request's, when the second has ended


def test_a_history_stays_short_and_even() -> None:
    account = Account(100)
    for step in range(10_000):
        account.note(step, 1, step, 10, [3, 5])
    steps = [moment.step for moment in account.history]
    assert 512 <= len(steps) <= 1024
    assert len({b - a for a, b in itertools.pairwise(steps)}) == 1
    assert account.history[1] == (steps[1], steps[1], 10, 2, 5)
    assert account.report()["mean_largest_hole"] == pytest.approx(0.05)


def test_a_full_pool_is_judged_by_the_steps_in_which_somebody_waits() -> None:
    # The second waits for two steps of the first, whose 3 and 4 tokens are live in 8 slots.
    reports = compare(make([(3, 2, 0), (6, 2, 0)]), 8, block_size=8, step_seconds=1.0)
    assert reports["paged"]["utilisation_refusing"] == pytest.approx(7 / 16)
    assert reports["paged"]["refused_steps"] == 2


def test_all_requests_end_and_paging_holds_most() -> None:
    trace = make_trace(300, 2.0, 60, 40, seed=1)
    reports = compare(trace, 2000)
    assert all(report["never_fit"] == 0 for report in reports.values())
    best = max(reports, key=lambda name: reports[name]["utilisation"])
    assert best.startswith("paged")
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
