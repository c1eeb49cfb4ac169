"""The whole engine against transformers, float32: raw logits of every draw, and greedy tokens.

Tokens are equal except where the reference's best two logits are closer than the tolerance; such
ties are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from engine_draws import Ties, compare_generated, generate
from tiny_models import TINY, VOCAB, save_tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

from pagedkv import LLM
from pagedkv.models.embedded import embedded_folder

pytestmark = pytest.mark.parity

SMOLLM2_PROMPTS = [
    "The capital of France is",
    "Photosynthesis is the process by which",
    "Once upon a time, in a small village by the sea,",
    "A binary search tree is a data structure in which",
    "In 1969, the first humans landed on",
]
# Block size and a token budget that it does not divide.
SIZES = [(1, 7), (3, 10), (16, 37)]

Tiny = Callable[[str], tuple[Path, PreTrainedModel]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Makes a tiny model of a family, once: its folder and transformers' own."""
    folder = tmp_path_factory.mktemp("models")
    made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def get(name: str) -> tuple[Path, PreTrainedModel]:
        if name not in made:
            made[name] = folder / name, save_tiny(name, folder / name)
        return made[name]

    return get


def prompts_of(lengths: Iterable[int]) -> list[list[int]]:
    """Prompts that share nothing: each has another first token."""
    return [[(5 * i * i + 7 * n + i) % VOCAB for i in range(n)] for n in lengths]


@pytest.mark.parametrize("name", sorted(TINY))
@pytest.mark.parametrize(("block_size", "budget"), SIZES)
def test_tiny_models(name: str, block_size: int, budget: int, tiny: Tiny) -> None:
    """All prompt lengths 1..4B + 1 in one batch, twice: cold, then found whole."""
    folder, reference = tiny(name)
    llm = LLM(folder, block_size=block_size, num_blocks=900, max_num_batched_tokens=budget)
    prompts = prompts_of(range(1, 4 * block_size + 2))
    ties = Ties()
    for cached in (lambda n: 0, lambda n: n - 1):
        runs = generate(llm, prompts, 6)
        assert [r.num_cached_tokens for r in runs] == [cached(len(p)) for p in prompts]
        compare_generated(reference, runs, ties)
    ties.finish()


@pytest.mark.parametrize("name", sorted(TINY))
@pytest.mark.parametrize(("block_size", "budget"), SIZES)
def test_prefix_hits_of_every_length(name: str, block_size: int, budget: int, tiny: Tiny) -> None:
    """Prompts leave a known one after 0, 1, ... all of its tokens: inside blocks and at borders.

    The first finds nothing, the last finds the whole of the known prompt, one repeats it.
    """
    folder, reference = tiny(name)
    llm = LLM(folder, block_size=block_size, num_blocks=900, max_num_batched_tokens=budget)
    (known,) = prompts_of([2 * block_size + 2])
    ties = Ties()
    first = generate(llm, [known], 3)
    compare_generated(reference, first, ties)
    continued = known + first[0].output
    prompts = [
        [*known[:cut], (continued[cut] + 1) % VOCAB, *((cut + 3 * i) % VOCAB for i in range(4))]
        for cut in range(len(known) + 1)
    ]
    runs = generate(llm, [*prompts, known], 4)
    cuts = [*range(len(known) + 1), len(known) - 1]
    assert [run.num_cached_tokens for run in runs] == cuts
    compare_generated(reference, runs, ties)
    ties.finish()


@pytest.mark.parametrize("backend", ["native", "gather", "reference"])
def test_every_backend(backend: str, tiny: Tiny) -> None:
    folder, reference = tiny("llama")
    llm = LLM(folder, num_blocks=100, block_size=5, attention_backend=backend)
    ties = Ties()
    compare_generated(reference, generate(llm, prompts_of([1, 4, 5, 6, 31]), 12), ties)
    ties.finish()


def test_smollm2_writes_what_transformers_writes() -> None:
    source = embedded_folder(torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    llm = LLM("smollm2-135m-instruct", dtype="float32", num_blocks=200)
    ties = Ties()
    compare_generated(reference, generate(llm, SMOLLM2_PROMPTS, 24), ties)
    ties.finish()
