"""What stands in slots that nobody has written reaches nobody."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_llm import save_tiny_llm

from pagedkv import LLM, SamplingParams

PROMPTS = [[7 * i % 50 for i in range(1 + 5 * j)] for j in range(5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llm")
    save_tiny_llm(path)
    return path


def outputs(folder: Path, backend: str, garbage: float | None) -> list[Any]:
    """Chunks, copies of shared tails, prefix hits and preemptions in a pool full of `garbage`.

    Before each batch it is put into all blocks that no name leads to, and the null block.
    """
    llm = LLM(
        folder,
        num_blocks=10,
        block_size=4,
        max_num_batched_tokens=7,
        deterministic=backend == "native",
        attention_backend=backend,
    )
    executor = llm.engine.core.executor
    store, collect = executor._backend, executor.collect
    # Who yields depends on what steps take, and that on the machine: here they take no time.
    executor.collect = lambda ticket: replace(collect(ticket), duration=0.0)
    pool = llm.engine.block_manager.pool
    params = SamplingParams(n=2, seed=1, temperature=1.0, max_tokens=6, logprobs=2)
    found: list[Any] = []
    for _ in range(2):
        if garbage is not None:
            ids = np.arange(11, dtype=np.int32)
            ids = ids[(ids == 0) | pool.is_free(ids)]
            content = torch.empty_like(store.read_blocks(ids))
            store.write_blocks(ids, content.fill_(garbage))
        for output in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params):
            found.append((output.num_cached_tokens, output.outputs))
    assert any(cached for cached, _ in found)
    assert llm.engine.core.scheduler.stats.num_preemptions
    return found


@pytest.mark.parametrize("backend", ["native", "gather", "reference"])
def test_free_blocks_the_null_block_and_unwritten_slots_are_inert(
    folder: Path, backend: str
) -> None:
    clean = outputs(folder, backend, None)
    for garbage in (float("nan"), float("inf"), float("-inf"), 1e4):
        assert outputs(folder, backend, garbage) == clean
