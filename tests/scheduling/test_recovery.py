"""Swap or recompute by predicted seconds: small cases worked out by hand."""

from __future__ import annotations

import math

import pytest

from pagedkv.scheduling.cost import CostModel, StepFeatures
from pagedkv.scheduling.recovery import (
    PARTIAL_DROP,
    RECOMPUTE,
    SWAP,
    Holding,
    Reuse,
    recover,
)

BLOCK = 4096  # bytes


def machine(token: float = 1e-3, pair: float = 1e-6, copy: float | None = None) -> CostModel:
    """Steps of 1 ms + `token` a token + `pair` a pair; `copy` seconds a block, each way."""
    cost = CostModel()
    for i in range(64):
        chunk = 10 + 37 * i % 101
        pairs = chunk * (53 * i % 400 + chunk / 2)
        cost.observe(StepFeatures(chunk, 0, pairs), 1e-3 + token * chunk + pair * pairs)
    if copy is not None:
        for pieces in (1, 2, 5):
            for link in (cost.link_in, cost.link_out):
                link.observe(pieces * BLOCK, pieces, pieces * copy)
    assert cost.fitted
    return cost


@pytest.mark.parametrize(
    ("tokens", "blocks", "lost"),
    [(30, 8, 30), (30, 1, 2), (30, 3, 10), (30, 0, 0), (28, 1, 4), (0, 0, 0)],
)
def test_tokens_of_the_last_blocks(tokens: int, blocks: int, lost: int) -> None:
    """B=4."""
    assert Holding(tokens, 8).lost_tokens(blocks, 4) == lost


def test_recomputing_counts_tokens_and_what_they_attend_to() -> None:
    """B=4: 25 blocks of 75, after 200 tokens that others hold as well."""
    found = recover(Holding(300, 25), 1, 4, machine())
    seconds = 100 * 1e-3 + 100 * (200 + 50) * 1e-6
    assert (found.kind, found.blocks, list(found.options)) == (RECOMPUTE, 25, [RECOMPUTE])
    assert found.loss == pytest.approx(seconds, rel=1e-3)
    assert found.loss_per_block == pytest.approx(seconds / 25, rel=1e-3)


def test_where_blocks_stay_findable_only_those_that_are_needed_are_lost() -> None:
    found = recover(Holding(298, 25, keeps=True), 3, 4, machine())
    assert (found.kind, found.blocks) == (PARTIAL_DROP, 3)
    assert found.loss == pytest.approx(10e-3 + 10 * (288 + 5) * 1e-6, rel=1e-3)
    assert found.options[RECOMPUTE] > found.loss
    for needed in (25, 26):
        found = recover(Holding(300, 25, keeps=True), needed, 4, machine())
        assert (found.kind, found.blocks, list(found.options)) == (RECOMPUTE, 25, [RECOMPUTE])


@pytest.mark.parametrize(("copy", "kind"), [(1e-3, SWAP), (2e-3, SWAP), (4e-3, RECOMPUTE)])
def test_the_way_of_fewer_seconds_is_chosen(copy: float, kind: str) -> None:
    """25 blocks out and in, 50 copies, against 0.125 s: even at 2.5 ms a copy."""
    found = recover(Holding(300, 25), 1, 4, machine(copy=copy), BLOCK)
    assert found.kind == kind and found.loss == min(found.options.values())
    assert found.options[SWAP] == pytest.approx(50 * copy, rel=1e-3)
    assert found.options[RECOMPUTE] == pytest.approx(0.125, rel=1e-3)


def test_only_what_would_be_lost_is_copied() -> None:
    """5 of 25 blocks: 5 out, less those that are below already, and 5 in."""
    cost = machine(copy=1e-3)
    found = recover(Holding(300, 25, keeps=True), 5, 4, cost, BLOCK)
    assert (found.kind, found.blocks) == (SWAP, 5) and len(found.options) == 3
    assert found.options[SWAP] == pytest.approx(10e-3, rel=1e-3)
    found = recover(Holding(300, 25, stored=3, keeps=True), 5, 4, cost, BLOCK)
    assert found.options[SWAP] == pytest.approx(7e-3, rel=1e-3)


def test_a_link_that_was_never_used_is_tried() -> None:
    assert recover(Holding(300, 25), 1, 4, machine(), BLOCK).kind == SWAP


def test_before_the_model_is_fitted_tokens_are_counted() -> None:
    found = recover(Holding(300, 25), 1, 4, CostModel())
    assert (found.kind, found.loss, found.loss_per_block) == (RECOMPUTE, 100.0, 4.0)
    found = recover(Holding(300, 25), 1, 4, CostModel(), BLOCK)
    assert (found.kind, found.loss) == (SWAP, 0.0)


def test_who_releases_nothing_is_no_bargain() -> None:
    assert recover(Holding(30, 0), 1, 4, CostModel()).loss_per_block == math.inf


def test_what_others_take_meanwhile_is_a_mean_over_those_who_came_back() -> None:
    reuse = Reuse()
    assert reuse.mean == 0.0
    for gone, held in ((4, 10), (8, 10)):
        reuse.observe(gone, held)
    assert reuse.mean == 6.0
    reuse.observe(2, 2)  # nothing was left: 2 or more
    assert reuse.mean == 6.0
    for _ in range(200):
        reuse.observe(1, 10)
    assert reuse.mean == pytest.approx(1.0, rel=1e-3)
