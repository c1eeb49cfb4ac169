"""The model executor: log-probabilities against transformers, row errors, failed steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_llm import save_tiny_llm
from transformers import LlamaForCausalLM

from pagedkv import LLM, RequestOutput, SamplingParams
from pagedkv.engine.executor import ModelExecutor

PROMPT = [(i * 37 + 11) % 250 for i in range(70)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    path = tmp_path_factory.mktemp("tiny-llm")
    return path, save_tiny_llm(path)


@pytest.fixture
def llm(model: tuple[Path, LlamaForCausalLM]) -> LLM:
    return LLM(model[0], num_blocks=64, block_size=4, max_num_batched_tokens=19)


def expected(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of the token after each position."""
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)


def generate(llm: LLM, ids: list[int], **params: Any) -> RequestOutput:
    sampling = SamplingParams(temperature=0, **params)
    return llm.generate({"prompt_token_ids": ids}, sampling)[0]


def test_logprobs_of_the_output(llm: LLM, model: tuple[Path, LlamaForCausalLM]) -> None:
    output = generate(llm, PROMPT, max_tokens=5, logprobs=3)
    sample = output.outputs[0]
    want = expected(model[1], [*PROMPT, *sample.token_ids])
    assert sample.logprobs is not None and len(sample.logprobs) == 5
    total = 0.0
    for i, (token, entries) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
        row = want[len(PROMPT) + i - 1]
        assert list(entries) == torch.topk(row, 3).indices.tolist() and token in entries
        for alternative, entry in entries.items():
            assert entry.logprob == pytest.approx(float(row[alternative]), abs=1e-4)
        assert entries[token].rank == 1
        total += float(row[token])
    assert sample.cumulative_logprob == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("length", [1, 2, 18, 19, 20, 70])
def test_logprobs_of_the_prompt_in_chunks(
    llm: LLM, model: tuple[Path, LlamaForCausalLM], length: int
) -> None:
    ids = PROMPT[:length]
    output = generate(llm, ids, max_tokens=1, prompt_logprobs=2)
    want = expected(model[1], ids)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == length
    assert output.prompt_logprobs[0] is None
    for i, entries in enumerate(output.prompt_logprobs[1:], start=1):
        assert entries is not None
        row = want[i - 1]
        assert next(iter(entries)) == ids[i]
        assert entries[ids[i]].logprob == pytest.approx(float(row[ids[i]]), abs=1e-4)
        assert entries[ids[i]].rank == 1 + int((row > row[ids[i]]).sum())


class Breaking:
    """A decoder that spoils the logits of some calls."""

    def __init__(self, decoder: Any, spoil: Any) -> None:
        self._decoder, self._spoil, self._calls = decoder, spoil, 0
        self.config = decoder.config

    def forward(self, *args: Any) -> torch.Tensor:
        logits = self._decoder.forward(*args).clone()
        self._calls += 1
        with torch.inference_mode():
            self._spoil(self._calls, logits)
            args[6][: len(logits)] = logits.argmax(dim=1)
        return logits


def break_with(llm: LLM, spoil: Any) -> None:
    executor = llm.engine.core.executor
    assert isinstance(executor, ModelExecutor)
    llm.engine.core.executor = ModelExecutor(
        Breaking(executor._decoder, spoil),
        executor._backend,
    )


def test_bad_logits_end_their_own_request_only(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": [i, i + 1]} for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=6)
    want = llm.generate(prompts, params)

    def spoil(call: int, logits: torch.Tensor) -> None:
        if call == 3:
            logits[1] = np.nan

    break_with(llm, spoil)
    got = llm.generate(prompts, params)
    assert [o.outputs[0].finish_reason for o in got] == ["length", "error", "length"]
    assert "finite" in (got[1].outputs[0].error or "")
    for i in (0, 2):
        assert got[i].outputs[0].token_ids == want[i].outputs[0].token_ids


def test_dead_engine_a_step_that_was_never_collected_is_dropped(llm: LLM) -> None:
    executor = llm.engine.core.executor
    want = generate(llm, PROMPT, max_tokens=3).outputs[0].token_ids
    collect = executor.collect

    def interrupted(ticket: Any) -> Any:
        executor.collect = collect
        raise KeyboardInterrupt

    executor.collect = interrupted
    with pytest.raises(KeyboardInterrupt):
        generate(llm, PROMPT, max_tokens=3)
    assert generate(llm, PROMPT, max_tokens=3).outputs[0].token_ids == want


def test_failed_step_ends_its_batch_and_the_engine_goes_on(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    want = llm.generate({"prompt_token_ids": PROMPT}, params)

    def spoil(call: int, logits: torch.Tensor) -> None:
        if call == 5:
            raise RuntimeError("the device fell over")

    break_with(llm, spoil)
    failed = llm.generate({"prompt_token_ids": PROMPT[::-1]}, params)[0].outputs[0]
    assert failed.finish_reason == "error" and "fell over" in (failed.error or "")
    assert llm.engine.block_manager.num_held_blocks == 0
    again = llm.generate({"prompt_token_ids": PROMPT}, params)
    assert again[0].outputs[0].token_ids == want[0].outputs[0].token_ids
