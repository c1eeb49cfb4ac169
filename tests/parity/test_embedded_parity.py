"""The embedded model against transformers, and against itself."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from paged_driver import PagedDriver
from transformers import AutoModelForCausalLM

from pagedkv.models import EMBEDDED_MODEL, load_model

TOLERANCE = 1e-3
TEXTS = (
    "The capital of France is",
    "A binary search tree is a data structure in which each node has at most two children, and",
    "Once upon a time, in a small village by the sea,",
)
pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def model():
    return load_model(EMBEDDED_MODEL, deterministic=True)


@pytest.fixture(scope="module")
def theirs(model):
    return AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).eval()


def prompts(model) -> list[list[int]]:
    chat = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name three rivers."}], add_generation_prompt=True
    )
    ids = chat["input_ids"] if hasattr(chat, "keys") else chat
    return [model.tokenizer(text).input_ids for text in TEXTS] + [list(ids)]


@pytest.mark.parametrize(("backend", "block_size"), [("native", 16), ("native", 3), ("gather", 16)])
def test_logits_equal_transformers(model, theirs, backend: str, block_size: int) -> None:
    decoder = model.decoder
    if backend == "gather":
        decoder = load_model(EMBEDDED_MODEL).decoder
    driver = PagedDriver(decoder, block_size, backend=backend)
    batch = prompts(model)
    for prompt, got in zip(batch, driver.teacher_force(batch, cycle((5, 7, 11))), strict=True):
        with torch.inference_mode():
            want = theirs(torch.tensor([prompt])).logits[0]
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
    for prompt, output in zip(batch, outputs, strict=True):
        with torch.inference_mode():
            want = theirs(torch.tensor([prompt + output])).logits[0][len(prompt) - 1 : -1]
        best = want.topk(2)
        clear = best.values[:, 0] - best.values[:, 1] > TOLERANCE
        assert torch.equal(best.indices[clear, 0], torch.tensor(output)[clear])
        assert int((~clear).sum()) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_batch(model, dtype) -> None:
    loaded = load_model(EMBEDDED_MODEL, dtype=dtype, deterministic=True)
    batch = prompts(model)
    got = PagedDriver(loaded.decoder, 3, backend="native").teacher_force(batch, cycle((7, 4, 12)))
    for prompt, logits in zip(batch, got, strict=True):
        driver = PagedDriver(loaded.decoder, 16, backend="native", num_seqs=1)
        assert torch.equal(driver.step([(0, prompt)])[0], logits)
