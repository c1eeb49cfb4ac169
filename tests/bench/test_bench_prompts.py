"""Prompts of a benchmark: their lengths, what they have in common, what they are made of."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.bench.prompts import Workload
from pagedkv.errors import ConfigError


def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def test_lengths_lie_around_the_middle() -> None:
    jobs = Workload(500, 10, 20, range_ratio=0.5).jobs(range(5), rng())
    assert {len(job.prompt) for job in jobs} == set(range(5, 16))
    assert {job.output_len for job in jobs} == set(range(10, 31))
    assert {token for job in jobs for token in job.prompt} == set(range(5))
    assert jobs == Workload(500, 10, 20, range_ratio=0.5).jobs(range(5), rng())


def test_the_prefix_is_the_same_for_all_and_comes_on_top() -> None:
    jobs = Workload(8, 6, 1, prefix_len=4).jobs(range(1000), rng())
    assert {len(job.prompt) for job in jobs} == {10}
    assert len({tuple(job.prompt[:4]) for job in jobs}) == 1
    assert len({tuple(job.prompt[4:]) for job in jobs}) == 8


def test_pieces_of_a_text_go_on_around_its_end() -> None:
    text = [5, 6, 7]
    jobs = Workload(20, 4, 1).jobs(range(3), rng(), text)
    assert {tuple(job.prompt) for job in jobs} == {(5, 6, 7, 5), (6, 7, 5, 6), (7, 5, 6, 7)}


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ({"num_prompts": 0}, "num_prompts=0"),
        ({"input_len": 0}, "input_len=0"),
        ({"output_len": -1}, "output_len=-1"),
        ({"prefix_len": -1}, "random_prefix_len=-1"),
        ({"range_ratio": 1.0}, "range_ratio=1.0"),
        ({"range_ratio": float("nan")}, "range_ratio=nan"),
    ],
)
def test_what_cannot_be(numbers: dict[str, float], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Workload(**({"num_prompts": 1, "input_len": 1, "output_len": 1} | numbers))
