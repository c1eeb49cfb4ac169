"""Steps without a prefill: the same every time, each row on blocks of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedkv.bench.steps import ModelSteps


@pytest.fixture(scope="module")
def steps(model: str) -> ModelSteps:
    return ModelSteps(model, torch.float32, num_blocks=12, block_size=4)


def test_a_step_samples_one_token_a_row_and_can_be_repeated(steps: ModelSteps) -> None:
    decode, chunk = steps.step(3, 13), steps.step(1, 20, 9)
    first = decode()
    assert first.parents.tolist() == [0, 1, 2]
    assert np.diff(first.indptr).tolist() == [1, 1, 1]
    assert first.errors == {}
    assert decode().tokens.tolist() == first.tokens.tolist()
    assert len(chunk().tokens) == 1


def test_more_rows_than_there_is_room_for(steps: ModelSteps) -> None:
    with pytest.raises(ValueError, match="4 rows of 4 blocks are more than the pool has"):
        steps.step(4, 13)
