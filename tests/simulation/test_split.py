"""Which split of devices gives most a device."""

from __future__ import annotations

import pytest

from pagedkv.errors import ConfigError
from pagedkv.simulation.split import Rates, Split, best_split, splits


def test_the_example_of_distserve():
    """13B on A100s: 5.6 requests/s prefilled, 10 decoded, 1.6 by a device that does both."""
    rates = Rates(5.6, 10.0, 1.6)
    best = best_split(rates, 3)
    assert (best.prefill, best.decode) == (2, 1)
    assert best.goodput == pytest.approx(10 / 3)
    assert best.goodput / rates.colocated == pytest.approx(2.08, abs=0.01)


def test_more_devices_fit_the_rates_more_exactly():
    found = splits(Rates(5.6, 10.0, 1.6), 14)
    assert [split.devices for split in found] == list(range(2, 15))
    assert found[-1] == Split(9, 5, pytest.approx(50 / 14))
    assert best_split(Rates(5.6, 10.0, 1.6), 14) == found[-1]


def test_of_equals_the_smallest_is_best():
    assert best_split(Rates(1.0, 1.0, 1.0), 8) == Split(1, 1, 0.5)


def test_a_side_that_bears_nothing():
    assert best_split(Rates(0.0, 1.0, 1.0), 4).goodput == 0.0


def test_what_cannot_be():
    with pytest.raises(ConfigError, match="prefill=-1"):
        Rates(-1.0, 1.0, 1.0)
    with pytest.raises(ConfigError, match="colocated=nan"):
        Rates(1.0, 1.0, float("nan"))
    with pytest.raises(ConfigError, match="devices=1: a split takes at least 2"):
        splits(Rates(1.0, 1.0, 1.0), 1)
