"""Utilisation against a sum over every single step."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.errors import ConfigError
from pagedkv.simulation.trace import Trace
from pagedkv.simulation.utilisation import utilisation


def make(lengths: list[tuple[int, int]]) -> Trace:
    prompts, outputs = np.array(lengths, np.int64).T
    return Trace(None, prompts, outputs, None, None, None)


def step_by_step(lengths: list[tuple[int, int]], size: int, limit: int) -> tuple[float, ...]:
    live = paged = most = pow2 = oracle = 0
    for prompt, output in lengths:
        power = 1
        while power < output:
            power *= 2
        for k in range(1, output + 1):
            tokens = prompt + k - 1
            live += tokens
            paged += -(-tokens // size) * size
            most += limit
            pow2 += prompt + power
            oracle += prompt + output
    return live / paged, live / most, live / pow2, live / oracle


@pytest.mark.parametrize("size", [1, 2, 7, 16])
def test_equals_the_sum_over_steps(size: int) -> None:
    rng = np.random.default_rng(size)
    lengths = [(int(p), int(o)) for p, o in rng.integers(1, 70, (40, 2))] + [(5, 0), (3, 1)]
    result = utilisation(make(lengths), [size], 200)
    got = (result.paged[size], result.max, result.pow2, result.oracle)
    assert got == pytest.approx(step_by_step(lengths, size, 200), rel=1e-12)


def test_the_maximum_is_the_longest_request_unless_given() -> None:
    trace = make([(5, 3), (2, 2)])
    assert utilisation(trace, [4]).max_length == 8
    result = utilisation(trace, [4], 6)
    assert (result.max_length, result.longer) == (6, 1)


def test_blocks_of_one_token_waste_nothing() -> None:
    assert utilisation(make([(3, 4)]), [1]).paged == {1: 1.0}


def test_what_makes_no_sense_is_refused() -> None:
    trace = make([(3, 4)])
    with pytest.raises(ConfigError, match="block size 0"):
        utilisation(trace, [16, 0])
    with pytest.raises(ConfigError, match="no block sizes"):
        utilisation(trace, [])
    with pytest.raises(ConfigError, match="max_length=0"):
        utilisation(trace, [16], 0)
    with pytest.raises(ConfigError, match="no request of the trace has an output"):
        utilisation(make([(3, 0)]), [16])
