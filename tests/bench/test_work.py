"""Work of a step against counts made another way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagedkv.bench.work import Work, step_work, total
from pagedkv.models.config import ModelConfig

CONFIG = ModelConfig.from_dict(
    {
        "model_type": "llama",
        "vocab_size": 50,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
)


def test_a_decode_step_reads_every_weight_and_every_token_once() -> None:
    parts = step_work(CONFIG, torch.bfloat16, rows=1, context=7)
    layer = 24 * (4 + 2 + 2) * 6 + 24 * 24 + 2 * 24 * 40 + 40 * 24
    weights = 3 * layer + 50 * 24
    kv = 2 * 2 * 6 * 3
    whole = total(parts.values())
    assert whole.num_bytes == 2 * (weights + 7 * kv + kv + 24)
    assert whole.operations == 2 * weights + 4 * 6 * 4 * 7 * 3


def test_rows_share_weights_and_not_tokens() -> None:
    one = step_work(CONFIG, torch.float32, rows=1, context=9)
    many = step_work(CONFIG, torch.float32, rows=5, context=9)
    assert many["down"] == replace(one["down"], operations=5 * one["down"].operations)
    assert many["attention"].num_bytes == 5 * one["attention"].num_bytes


def test_a_chunk_sees_what_stands_before_each_token() -> None:
    chunk = step_work(CONFIG, torch.float32, rows=1, context=6, query=4)
    seen = 3 + 4 + 5 + 6
    assert chunk["attention"].operations == 4 * 6 * 4 * seen * 3
    one = step_work(CONFIG, torch.float32, rows=1, context=6)
    assert chunk["norm, head"] == one["norm, head"]
    assert chunk["output"].operations == 4 * one["output"].operations
    assert chunk["attention"].num_bytes == one["attention"].num_bytes


def test_nothing_adds_up_to_nothing() -> None:
    assert total([]) == Work(0, 0)
    assert total([Work(1, 2), Work(3, 4)]) == Work(4, 6)


@pytest.mark.parametrize("query", [1, 9])
def test_parts_come_in_the_order_of_a_step(query: int) -> None:
    assert list(step_work(CONFIG, torch.float32, 1, 9, query)) == [
        "embedding",
        "norm, QKV",
        "rotary, write",
        "attention",
        "output",
        "norm, gate and up, SiLU",
        "down",
        "norm, head",
    ]
