"""Who yields: small cases worked out by hand."""

from __future__ import annotations

import pytest
from harness import Run

from pagedkv.scheduling.cost import CostModel, StepFeatures
from pagedkv.scheduling.policies.fcfs import Fcfs
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.victims import choose_victim


def running(
    lengths: dict[str, int], prefix_caching: bool = False, block_size: int = 4, **params: int
) -> Run:
    """One running request a name, its whole prompt of so many tokens computed, none shared."""
    run = Run(64, block_size, 200, prefix_caching=prefix_caching)
    for i, (name, length) in enumerate(lengths.items()):
        run.add(name, [i + 1] * length, max_tokens=9, temperature=1.0, **params)
    run.step()
    assert len(run.scheduler._roster.running) == len(lengths)
    return run


def victim(run: Run, shortage: int = 1, cost: CostModel | None = None) -> str:
    return choose_victim(run.scheduler._roster, shortage, cost or CostModel(), 0.0).request.id


def test_who_loses_least_for_a_block_yields() -> None:
    """5 tokens in 2 blocks are 2.5 a block, 3 in 1 are 3, 8 in 2 are 4; the first stays."""
    run = running({"first": 1, "cheap": 5, "small": 3, "dear": 8})
    assert victim(run) == "cheap"
    run.finish()


def test_the_last_in_order_yields_among_equals() -> None:
    run = running({"first": 8, "second": 8, "third": 8})
    assert victim(run) == "third"
    run.finish()


def test_who_has_yielded_before_weighs_more() -> None:
    """With the token drawn meanwhile: 2 * 6 / 2 a block against 8 / 2."""
    run = running({"first": 1, "cheap": 5, "dear": 7})
    assert victim(run) == "cheap"
    assert run.preempt("cheap")
    run.step()
    assert victim(run) == "dear"
    run.finish()


@pytest.mark.parametrize(("caching", "yields"), [(True, "long"), (False, "short")])
def test_with_a_cache_only_what_is_reused_is_lost(caching: bool, yields: str) -> None:
    """One block short: the tails are lost, 1 token against 2; else 21 / 6 against 10 / 3."""
    run = running({"first": 4, "long": 21, "short": 10}, prefix_caching=caching)
    assert victim(run) == yields
    run.finish()


def test_more_is_lost_than_is_short_if_it_was_so_before() -> None:
    """B=4, P=7: "late" holds 3 blocks and yields for one; "early" takes another one meanwhile."""
    run = Run(7, 4, 32)
    run.add("early", [1] * 12, max_tokens=10)
    run.add("late", [2] * 11, max_tokens=6)
    while run.scheduler.stats.num_preemptions == 0:
        run.step()
    roster = run.scheduler._roster
    assert roster.reuse.mean == 0.0 and run.request("late").held_tokens == 12
    while not run.request("late").branches:
        run.step()
    assert roster.reuse.mean == 2.0
    run.finish()
    run = running({"first": 4, "other": 21}, prefix_caching=True)
    roster = run.scheduler._roster
    roster.reuse.observe(3, 9)
    found = choose_victim(roster, 1, CostModel(), 0.0).recovery
    assert (found.kind, found.blocks, found.loss) == ("partial_drop", 3, 9.0)
    run.finish()


def test_the_samples_of_a_group_find_nothing_of_their_own() -> None:
    """2 samples: 8 tokens of the prompt in 2 blocks and one more block each, 12 tokens."""
    run = running({"first": 4, "group": 8, "other": 11}, prefix_caching=True, n=2)
    for _ in range(2):
        run.step()
    group = run.request("group")
    assert group.num_computed == 8 + 2 * 2
    found = choose_victim(run.scheduler._roster, 1, CostModel(), 0.0)
    assert found.recovery.options == {"recompute": float(found.request.num_computed)}
    run.finish()


def test_who_shares_all_it_has_releases_nothing_and_stays() -> None:
    run = Run(64, 4, 200)
    run.add("before", [1] * 8, max_tokens=1)
    run.finish()
    for name in ("first", "twin"):
        run.add(name, [*[1] * 8], max_tokens=9)
    run.add("own", [2] * 15, max_tokens=9)
    run.step()
    blocks = [
        run.manager.exclusive_blocks([[b.seq for b in r.branches]])[0]
        for r in run.scheduler._roster.running
    ]
    assert blocks == [0, 0, 4] and victim(run) == "own"
    run.finish()


def test_who_is_being_loaded_releases_nothing_yet() -> None:
    run = running({"first": 1, "cheap": 5, "dear": 8})
    run.request("cheap").branches[0].loading = 1
    assert victim(run) == "dear"
    run.request("cheap").branches[0].loading = 0
    run.finish()


def test_predicted_seconds_decide_once_the_model_is_fitted() -> None:
    """40 tokens in 10 blocks are 4 a block as 8 in 2 are, but they attend to more."""
    cost = CostModel()
    for i in range(64):
        chunk = 10 + 37 * i % 101
        pairs = chunk * (53 * i % 400 + chunk / 2)
        cost.observe(StepFeatures(chunk, 0, pairs), 1e-3 + 1e-3 * chunk + 1e-3 * pairs)
    run = running({"first": 4, "short": 8, "long": 40})
    assert victim(run) == "long" and victim(run, cost=cost) == "short"
    run.finish()


class Named(Fcfs):
    """Lets one request yield before all others."""

    def __init__(self, name: str) -> None:
        self.name = name

    def yield_class(self, request: Request, now: float) -> float:
        return float(request.id == self.name)


@pytest.mark.parametrize(("name", "yields"), [("dear", "dear"), ("first", "cheap")])
def test_the_class_comes_before_the_loss_but_the_first_never_yields(name: str, yields: str) -> None:
    run = running({"first": 1, "cheap": 5, "dear": 8})
    run.scheduler._roster.policy = Named(name)
    assert victim(run) == yields
    run.finish()


def test_durations_of_results_make_the_cost_model() -> None:
    run = Run()
    run.add("a", [1, 2, 3], max_tokens=3)
    run.finish()
    cost = run.scheduler.cost
    assert (cost.num_observed, cost.num_ignored) == (0, 3)  # the toy takes no time
