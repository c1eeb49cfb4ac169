"""How far bfloat16 is from float32: shared by bench_accuracy.py and tests/parity.

The text is the first chapter of Lewis Carroll, "Alice's Adventures in Wonderland" (1865), which is
in the public domain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from pagedkv.attention.backends import make_backend
from pagedkv.attention.interface import AttentionBatch
from pagedkv.models import Decoder

TEXT = Path(__file__).parent / "texts" / "alice.txt"
NUM_PROMPTS = 64
BLOCK_SIZE = 16
CHUNK = 256  # tokens of a sequence that our model computes at a time
CONTEXT = 900  # tokens of a text that are one sequence

# Logits [len(tokens), V] in float32 of one sequence, in chunks.
Logits = Callable[[Sequence[int]], Iterator[torch.Tensor]]


def text_tokens(tokenizer: Any) -> list[int]:
    return list(tokenizer(TEXT.read_text(encoding="utf-8")).input_ids)


def make_prompts(tokens: Sequence[int], count: int = NUM_PROMPTS) -> list[list[int]]:
    """`count` of the 64 prompts, evenly chosen: pieces of the text, of 16 to 79 tokens."""
    chosen = range(0, NUM_PROMPTS, NUM_PROMPTS // count)
    starts = [i * (len(tokens) - 80) // NUM_PROMPTS for i in chosen]
    lengths = [16 + i * 29 % 64 for i in chosen]
    return [
        list(tokens[start : start + length]) for start, length in zip(starts, lengths, strict=True)
    ]


def paged(decoder: Decoder, backend_name: str = "native") -> Logits:
    """Our model, over a cache of its own for each sequence."""

    def logits(tokens: Sequence[int]) -> Iterator[torch.Tensor]:
        num_blocks = -(-len(tokens) // BLOCK_SIZE)
        spec = decoder.config.kv_spec(num_blocks, BLOCK_SIZE, decoder.dtype)
        backend = make_backend(backend_name, spec)
        table = np.arange(1, num_blocks + 1, dtype=np.int32)[None]
        for start in range(0, len(tokens), CHUNK):
            chunk = tokens[start : start + CHUNK]
            end = start + len(chunk)
            positions = np.arange(start, end)
            batch = AttentionBatch(
                np.array([len(chunk)], np.int32),
                np.array([end], np.int32),
                table,
                positions + BLOCK_SIZE,  # block 1 is the first
            )
            yield decoder.forward(
                torch.tensor(chunk),
                torch.from_numpy(positions),
                backend,
                backend.plan(batch),
                torch.arange(len(chunk)),
            )

    return logits


def transformers_model(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def transformers(model: Any) -> Logits:
    """transformers' model, all tokens at once."""

    def logits(tokens: Sequence[int]) -> Iterator[torch.Tensor]:
        with torch.inference_mode():
            yield model(torch.tensor([tokens])).logits[0].float()

    return logits


def each_logits(model: Logits, prompts: Iterable[Sequence[int]]) -> Iterator[torch.Tensor]:
    """[len(prompt), V] of one prompt after the other: those of all take 600 MB."""
    return (torch.cat(list(model(prompt))) for prompt in prompts)


def rms_error(got: Iterable[torch.Tensor], want: Iterable[torch.Tensor]) -> float:
    """Root mean square of the difference of logits [n, V], each row less its mean.

    A constant added to a row of logits changes no probability.
    """
    total, count = 0.0, 0
    for ours, theirs in zip(got, want, strict=True):
        difference = ours.double() - theirs.double()
        difference -= difference.mean(dim=-1, keepdim=True)
        total += float(difference.pow(2).sum())
        count += difference.numel()
    return math.sqrt(total / count)


def perplexity(model: Logits, tokens: Sequence[int]) -> float:
    """exp of the mean negative log-likelihood of each token after those before it.

    Sequences of CONTEXT tokens, each computed by itself.
    """
    total, count = 0.0, 0
    for first in range(0, len(tokens), CONTEXT):
        sequence, position = tokens[first : first + CONTEXT], 1
        for logits in model(sequence):
            wanted = torch.tensor(sequence[position : position + len(logits)])
            total += float(F.cross_entropy(logits[: len(wanted)], wanted, reduction="sum"))
            position += len(logits)
        count += len(sequence) - 1
    return math.exp(total / count)
