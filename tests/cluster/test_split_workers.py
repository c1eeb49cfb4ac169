"""Prefill apart from decode: moved requests, and deaths on either side."""

from __future__ import annotations

import random
from pathlib import Path

import httpx
import pytest
from clustered import MOST, Clustered, Load

_SEEDS = [
    *range(3),
    *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(3, 10)),
]


@pytest.fixture(scope="module")
def load(model: Path) -> Load:
    return Load(model)


def test_requests_move_and_give_the_tokens_of_one_engine(split: Clustered, load: Load) -> None:
    assert load.run(split) == load.expected
    split.at_rest()
    metrics = httpx.get(f"{split.url}/metrics").text
    assert f'pagedkv:requests_moved_total{{outcome="done"}} {len(load.requests)}.0' in metrics
    assert 'pagedkv:requests_moved_total{outcome="failed"} 0.0' in metrics


@pytest.mark.parametrize("who", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("seed", _SEEDS)
def test_a_death_on_either_side_is_not_seen(
    split: Clustered, load: Load, who: str, seed: int
) -> None:
    after = random.Random(f"{who} {seed}").randrange(1, MOST)
    assert load.run(split, after, lambda: split.kill(who)) == load.expected
    split.at_rest()
