"""Swap or recompute by predicted seconds: small cases worked out by hand."""

from __future__ import annotations

import math

import pytest

from pagedkv.scheduling.cost import CostModel, StepFeatures
from pagedkv.scheduling.recovery import (
    RECOMPUTE,
    SWAP,
    Holding,
    holding,
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
    ("tokens", "exclusive", "needed", "keeps", "expected"),
    [
        (30, 8, 1, False, Holding(30, 30, 8)),  # B=4: a tail of 2
        (30, 8, 1, True, Holding(30, 2, 1)),  # only the tail is reused
        (30, 8, 3, True, Holding(30, 10, 3)),
        (30, 8, 20, True, Holding(30, 30, 8)),
        (30, 2, 20, True, Holding(30, 6, 2)),  # 6 blocks have other holders
        (30, 0, 1, False, Holding(30, 0, 0)),
        (0, 0, 1, True, Holding(0, 0, 0)),
    ],
)
def test_what_is_given_up(
    tokens: int, exclusive: int, needed: int, keeps: bool, expected: Holding
) -> None:
    assert holding(tokens, exclusive, needed, 4, keeps) == expected


def test_recomputing_counts_tokens_and_what_they_attend_to() -> None:
    found = recover(Holding(300, 100, 25), machine())
    seconds = 100 * 1e-3 + 100 * (200 + 50) * 1e-6
    assert found.kind == RECOMPUTE and list(found.options) == [RECOMPUTE]
    assert found.loss == pytest.approx(seconds, rel=1e-3)
    assert found.loss_per_block == pytest.approx(seconds / 25, rel=1e-3)


@pytest.mark.parametrize(("copy", "kind"), [(1e-3, SWAP), (2e-3, SWAP), (4e-3, RECOMPUTE)])
def test_the_way_of_fewer_seconds_is_chosen(copy: float, kind: str) -> None:
    """25 blocks out and in, 50 copies, against 0.125 s: even at 2.5 ms a copy."""
    found = recover(Holding(300, 100, 25), machine(copy=copy), BLOCK)
    assert found.kind == kind and found.loss == min(found.options.values())
    assert found.options[SWAP] == pytest.approx(50 * copy, rel=1e-3)
    assert found.options[RECOMPUTE] == pytest.approx(0.125, rel=1e-3)


def test_blocks_that_are_below_already_are_not_copied_out_again() -> None:
    cost = machine(copy=4e-3)
    found = recover(Holding(300, 100, 25, stored=20), cost, BLOCK)
    assert found.options[SWAP] == pytest.approx(30 * 4e-3, rel=1e-3) and found.kind == SWAP


def test_a_link_that_was_never_used_is_tried() -> None:
    assert recover(Holding(300, 100, 25), machine(), BLOCK).kind == SWAP


def test_before_the_model_is_fitted_tokens_are_counted() -> None:
    found = recover(Holding(300, 100, 25), CostModel())
    assert (found.kind, found.loss, found.loss_per_block) == (RECOMPUTE, 100.0, 4.0)
    assert recover(Holding(300, 100, 25), CostModel(), BLOCK).kind == SWAP


def test_who_releases_nothing_is_no_bargain() -> None:
    assert recover(Holding(30, 0, 0), CostModel()).loss_per_block == math.inf
