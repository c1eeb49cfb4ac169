"""A tiny model on every instruction set that this machine has: right, and equal to itself."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest
import torch
from engine_draws import TOLERANCE, teacher_forced
from paged_driver import PagedDriver
from tiny_models import VOCAB, save_tiny

from pagedkv.attention.isa import ISA_VARIABLE, available_isas
from pagedkv.attention.native import import_native
from pagedkv.models import load_model

LENGTHS = (1, 7, 17, 40, 150)  # the last ends behind a span of 128 positions
pytestmark = [
    pytest.mark.parity,
    pytest.mark.parametrize("isa", available_isas(import_native())),
]


@pytest.fixture(scope="module", params=["llama-head-dim", "qwen2"])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return save_tiny(request.param, folder), folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]


def load(monkeypatch: pytest.MonkeyPatch, isa: str, folder, dtype: torch.dtype):
    monkeypatch.setenv(ISA_VARIABLE, isa)
    return load_model(folder, dtype, deterministic=True).decoder


def driver(decoder, block_size: int) -> PagedDriver:
    return PagedDriver(decoder, block_size, "native", len(LENGTHS), max(LENGTHS))


def test_logits_equal_transformers(monkeypatch, isa: str, saved, prompts) -> None:
    theirs, folder = saved
    decoder = load(monkeypatch, isa, folder, torch.float32)
    wanted = teacher_forced(theirs, prompts)
    got = driver(decoder, 16).teacher_force(prompts, cycle((5, 64, 11)))
    for logits, want in zip(got, wanted, strict=True):
        assert (logits - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_batch(monkeypatch, isa: str, saved, prompts, dtype) -> None:
    decoder = load(monkeypatch, isa, saved[1], dtype)
    alone = [driver(decoder, 16).step([(0, prompt)])[0] for prompt in prompts]
    for block_size, chunks in ((16, (150,)), (3, (1, 2, 5, 70))):
        got = driver(decoder, block_size).teacher_force(prompts, cycle(chunks))
        for logits, want in zip(got, alone, strict=True):
            assert torch.equal(logits, want)
