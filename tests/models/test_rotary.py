"""The rotary table: as long as what was asked for, and the same bits however it grew."""

from __future__ import annotations

import pytest
import torch

from pagedkv.models import RopeConfig
from pagedkv.models.rotary import CHUNK, Rotary, inverse_frequencies

ROPE = RopeConfig(10000.0)
LLAMA3 = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)


def whole_table(rope: RopeConfig, head_dim: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Computed at once."""
    positions = torch.arange(count, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope, head_dim)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("rope", [ROPE, LLAMA3], ids=["default", "llama3"])
@pytest.mark.parametrize("head_dim", [2, 6, 64, 128])
@pytest.mark.parametrize(
    "ends", [[5000], [1, 2, CHUNK, CHUNK + 1, 5000], [CHUNK + 1, 5 * CHUNK]], ids=str
)
def test_a_table_that_grows_has_the_bits_of_one_made_at_once(rope, head_dim, ends) -> None:
    rotary = Rotary(rope, head_dim, 131072)
    for end in ends:
        got = rotary.at(torch.arange(end))
        for table, want in zip(got, whole_table(rope, head_dim, end), strict=True):
            assert torch.equal(table[:, 0], want)


def test_a_promise_of_far_too_many_positions_costs_nothing() -> None:
    rotary = Rotary(ROPE, 64, 10**12)
    cos, _ = rotary.at(torch.tensor([3000, 7]))
    assert torch.equal(cos[:, 0], whole_table(ROPE, 64, 3001)[0][[3000, 7]])


def test_positions_end_where_the_model_says() -> None:
    rotary = Rotary(ROPE, 8, 2000)
    assert len(rotary.at(torch.tensor([1999]))[0]) == 1
    for beyond in (2000, 10**12):
        with pytest.raises(IndexError):
            rotary.at(torch.tensor([beyond]))


def test_no_tokens_need_no_table() -> None:
    cos, sin = Rotary(ROPE, 8, 2000).at(torch.empty(0, dtype=torch.int64))
    assert cos.shape == sin.shape == (0, 1, 4)
