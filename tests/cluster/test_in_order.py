"""What overtakes waits for what it has overtaken."""

from __future__ import annotations

import random

import pytest

from pagedkv.cluster.in_order import InOrder


def test_parcels_come_out_in_the_order_of_their_numbers() -> None:
    parcels: InOrder[str] = InOrder()
    assert parcels.take(1, "b") == [] and parcels.missing == 0
    assert parcels.take(0, "a") == ["a", "b"] and parcels.missing is None
    assert parcels.take(0, "a again") == []
    assert parcels.take(2, "c") == ["c"]


@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_order_all_come_out_once(seed: int) -> None:
    parcels: InOrder[int] = InOrder()
    numbers = [*range(30), *range(0, 30, 7)]
    random.Random(seed).shuffle(numbers)
    assert [it for number in numbers for it in parcels.take(number, number)] == [*range(30)]
