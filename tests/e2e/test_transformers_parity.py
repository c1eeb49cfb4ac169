"""Greedy text of the whole engine against transformers' own `generate`, float32.

Tokens are equal except where the reference's best two logits are closer than the tolerance; such
ties are counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pagedkv import LLM, SamplingParams
from pagedkv.models.embedded import embedded_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
from tiny_models import TINY, VOCAB, save_tiny

TOLERANCE = 1e-3
pytestmark = pytest.mark.parity

SMOLLM2_PROMPTS = [
    "The capital of France is",
    "Photosynthesis is the process by which",
    "Once upon a time, in a small village by the sea,",
    "A binary search tree is a data structure in which",
    "In 1969, the first humans landed on",
]


class Ties:
    """Counts draws, and those where the reference itself was undecided."""

    def __init__(self) -> None:
        self.draws = self.ties = 0

    def compare(self, reference: PreTrainedModel, prompt: list[int], output: list[int]) -> None:
        """Each of our tokens must be the reference's choice after our own prefix."""
        ids = torch.tensor([prompt + output])
        with torch.inference_mode():
            logits = reference(ids).logits[0, len(prompt) - 1 : -1]
        best = logits.max(dim=-1).values
        ours = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        behind = (best - ours).tolist()
        self.draws += len(output)
        self.ties += sum(0 < gap < TOLERANCE for gap in behind)
        wrong = [i for i, gap in enumerate(behind) if gap >= TOLERANCE]
        assert not wrong, f"token {wrong[0]} of prompt {prompt[:8]}... is {behind[wrong[0]]} behind"

    def finish(self) -> None:
        assert self.draws and self.ties * 500 <= self.draws, f"{self.ties} ties in {self.draws}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def prompts_of(lengths: Iterator[int] | list[int] | range) -> list[list[int]]:
    return [[(5 * i * i + 7 * n + i) % VOCAB for i in range(n)] for n in lengths]


def generate(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", sorted(TINY))
@pytest.mark.parametrize(("block_size", "budget"), [(1, 7), (3, 10), (16, 37)])
def test_tiny_models(name: str, block_size: int, budget: int, folder: Path) -> None:
    """All prompt lengths 1..4B + 1 in one batch, twice: cold, then with prefix hits."""
    target = folder / name
    reference = save_tiny(name, target)
    llm = LLM(target, block_size=block_size, num_blocks=900, max_num_batched_tokens=budget)
    prompts = prompts_of(range(1, 4 * block_size + 2))
    ties = Ties()
    for _ in range(2):
        for prompt, output in zip(prompts, generate(llm, prompts, 6), strict=True):
            ties.compare(reference, prompt, output)
    ties.finish()


@pytest.mark.parametrize("backend", ["native", "gather", "reference"])
def test_every_backend(backend: str, folder: Path) -> None:
    target = folder / f"llama-{backend}"
    reference = save_tiny("llama", target)
    llm = LLM(target, num_blocks=100, block_size=5, attention_backend=backend)
    ties = Ties()
    prompts = prompts_of([1, 4, 5, 6, 31])
    for prompt, output in zip(prompts, generate(llm, prompts, 12), strict=True):
        ties.compare(reference, prompt, output)
    ties.finish()


def test_smollm2_writes_what_transformers_writes() -> None:
    source = embedded_folder(torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    llm = LLM("smollm2-135m-instruct", dtype="float32", num_blocks=200)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    ties = Ties()
    for output in llm.generate(SMOLLM2_PROMPTS, params):
        ties.compare(reference, list(output.prompt_token_ids), list(output.outputs[0].token_ids))
    ties.finish()
