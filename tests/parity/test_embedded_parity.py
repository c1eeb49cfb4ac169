"""The embedded model against transformers, and against itself."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from engine_draws import TOLERANCE, Ties, compare_generated, generate, teacher_forced
from paged_driver import PagedDriver
from transformers import AutoModelForCausalLM

from pagedkv import LLM
from pagedkv.models import EMBEDDED_MODEL, load_model

TEXTS = (
    "The capital of France is",
    "A binary search tree is a data structure in which each node has at most two children, and",
    "Once upon a time, in a small village by the sea,",
)
LONG_TEXT = (
    "The tide had gone out during the night, and in the morning the harbour was nothing but mud, "
    "ropes and a few small boats lying on their sides. An old man walked slowly along the wall, "
    "counting them as he did every day, and wondered which of them would leave first with the "
    "evening water, and which of them would never leave again."
)
LONGEST = 65  # 4B + 1 of the largest block size
# Block size, and token budgets that it does not divide or that do not divide it.
SIZES = [(1, 7), (3, 10), (16, 37)]
pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def model():
    return load_model(EMBEDDED_MODEL, deterministic=True)


@pytest.fixture(scope="module")
def theirs(model):
    return AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def text(model) -> list[int]:
    ids = model.tokenizer(LONG_TEXT).input_ids
    assert len(ids) >= LONGEST
    return list(ids[:LONGEST])


@pytest.fixture(scope="module")
def text_logits(theirs, text) -> torch.Tensor:
    """[65, V]: row n - 1 is what follows the first n tokens."""
    return teacher_forced(theirs, [text])[0]


def prompts(model) -> list[list[int]]:
    chat = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name three rivers."}], add_generation_prompt=True
    )
    ids = chat["input_ids"] if hasattr(chat, "keys") else chat
    return [model.tokenizer(text).input_ids for text in TEXTS] + [list(ids)]


@pytest.mark.parametrize(("backend", "block_size"), [("native", 16), ("native", 3), ("gather", 16)])
def test_logits_equal_transformers(model, theirs, backend: str, block_size: int) -> None:
    """On the default path, and with nothing of it: torch alone."""
    decoder = model.decoder
    if backend == "gather":
        decoder = load_model(EMBEDDED_MODEL, kernels="torch").decoder
    driver = PagedDriver(decoder, block_size, backend=backend)
    batch = prompts(model)
    wanted = teacher_forced(theirs, batch)
    for got, want in zip(driver.teacher_force(batch, cycle((5, 7, 11))), wanted, strict=True):
        assert (got - want).abs().max() < TOLERANCE


def test_greedy_text_equals_transformers(model, theirs) -> None:
    """Unless the two best logits of the reference are closer than the tolerance."""
    batch, count = prompts(model), 12
    driver = PagedDriver(model.decoder, 4, backend="native")
    outputs: list[list[int]] = [[] for _ in batch]
    rows = list(enumerate(batch))
    for _ in range(count):
        for seq, logits in enumerate(driver.step(rows)):
            outputs[seq].append(int(logits[-1].argmax()))
        rows = [(seq, [output[-1]]) for seq, output in enumerate(outputs)]
    ties = Ties()
    wanted = teacher_forced(theirs, [p + o for p, o in zip(batch, outputs, strict=True)])
    for prompt, output, want in zip(batch, outputs, wanted, strict=True):
        ties.compare(want[len(prompt) - 1 : -1], output)
    ties.finish()


def compare_prefixes(
    llm: LLM, text: list[int], text_logits: torch.Tensor, lengths: list[int], cached: list[int]
) -> None:
    """One draw after each of the first `lengths` tokens, all in one batch."""
    runs = generate(llm, [text[:n] for n in lengths], 1)
    assert [run.num_cached_tokens for run in runs] == cached
    ties = Ties()
    for n, run in zip(lengths, runs, strict=True):
        want = text_logits[n - 1 : n]
        assert (run.logits - want).abs().max() < TOLERANCE, f"prompt of {n} tokens"
        ties.compare(want, run.output)
    ties.finish()


def engine(block_size: int, budget: int, prefix_caching: bool = True) -> LLM:
    return LLM(
        EMBEDDED_MODEL,
        dtype="float32",
        block_size=block_size,
        num_blocks=3000 // block_size,
        max_num_batched_tokens=budget,
        enable_prefix_caching=prefix_caching,
    )


def compare_cold_and_hits(
    theirs, text: list[int], text_logits: torch.Tensor, size: tuple[int, int], some: bool
) -> None:
    """Prompts of 1..4B + 1 tokens: nothing cached, then all of it.

    Then prompts that leave the text after 0, 1, ..., 2B + 1 tokens, with two tokens of their own:
    hits that are absent, partial and end inside a block or at its border. `some`: the lengths
    around block borders only.
    """
    block_size, budget = size
    lengths = list(range(1, 4 * block_size + 2))
    if some:
        lengths = [n for n in lengths if n <= 2 or (n + 1) % block_size <= 2]
    compare_prefixes(
        engine(block_size, budget, False), text, text_logits, lengths, [0] * len(lengths)
    )
    llm = engine(block_size, budget)
    compare_prefixes(llm, text, text_logits, [LONGEST], [0])
    compare_prefixes(llm, text, text_logits, lengths, [n - 1 for n in lengths])
    cuts = [0, *(n for n in lengths if n <= 2 * block_size + 1)]
    runs = generate(llm, [[*text[:n], (text[n] + 1) % 40_000, 300 + n] for n in cuts], 1)
    assert [run.num_cached_tokens for run in runs] == cuts
    ties = Ties()
    compare_generated(theirs, runs, ties)
    ties.finish()


@pytest.mark.parametrize("size", SIZES)
def test_prompts_around_block_borders_cold_and_with_hits(theirs, text, text_logits, size) -> None:
    compare_cold_and_hits(theirs, text, text_logits, size, some=True)


@pytest.mark.deep
@pytest.mark.parametrize("size", [*SIZES, (1, 300), (3, 4), (16, 9), (16, 300)])
def test_prompts_of_every_length_cold_and_with_hits(theirs, text, text_logits, size) -> None:
    compare_cold_and_hits(theirs, text, text_logits, size, some=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_batch(model, dtype) -> None:
    loaded = load_model(EMBEDDED_MODEL, dtype=dtype, deterministic=True)
    batch = prompts(model)
    got = PagedDriver(loaded.decoder, 3, backend="native").teacher_force(batch, cycle((7, 4, 12)))
    for prompt, logits in zip(batch, got, strict=True):
        driver = PagedDriver(loaded.decoder, 16, backend="native", num_seqs=1)
        assert torch.equal(driver.step([(0, prompt)])[0], logits)
