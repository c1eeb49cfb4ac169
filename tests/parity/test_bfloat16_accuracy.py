"""bfloat16 is as near to float32 as transformers' bfloat16, on every path that computes it.

`benchmarks/bench_accuracy.py` prints the figures.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from accuracy import (
    Logits,
    each_logits,
    make_prompts,
    paged,
    perplexity,
    rms_error,
    text_tokens,
    transformers,
    transformers_model,
)
from pagedkv.attention.isa import ISA_VARIABLE, available_isas
from pagedkv.attention.native import import_native
from pagedkv.models import EMBEDDED_MODEL, load_model

FEW = 8  # prompts that `make test` has time for
PERPLEXITY = 0.005
PATHS = [*reversed(available_isas(import_native())), "torch"]
# The plain path rounds where transformers does, at random to its better or worse.
LUCK = 1.1
pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def exact() -> Logits:
    """transformers in float32, with the float32 weights."""
    return transformers(transformers_model(load_model(EMBEDDED_MODEL).path, torch.float32))


@pytest.fixture(scope="module")
def theirs() -> Logits:
    """transformers in bfloat16."""
    folder = load_model(EMBEDDED_MODEL, torch.bfloat16).path
    return transformers(transformers_model(folder, torch.bfloat16))


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return text_tokens(load_model(EMBEDDED_MODEL).tokenizer)


@pytest.fixture(scope="module")
def exact_perplexity(exact: Logits, tokens: list[int]) -> float:
    return perplexity(exact, tokens)


@pytest.fixture
def ours(path: str, monkeypatch: pytest.MonkeyPatch) -> Logits:
    """Our model in bfloat16 on a path: an instruction set of the native kernels, or torch."""
    if path == "torch":
        return paged(load_model(EMBEDDED_MODEL, torch.bfloat16, kernels="torch").decoder)
    monkeypatch.setenv(ISA_VARIABLE, path)
    return paged(load_model(EMBEDDED_MODEL, torch.bfloat16).decoder)


class Errors:
    """Over some prompts: what float32 says, and how far transformers' bfloat16 is from it."""

    def __init__(self, exact: Logits, theirs: Logits, prompts: Sequence[Sequence[int]]) -> None:
        self.prompts = prompts
        self.want = list(each_logits(exact, prompts))
        self.bar = rms_error(each_logits(theirs, prompts), self.want)

    def compare(self, ours: Logits, path: str) -> None:
        error = rms_error(each_logits(ours, self.prompts), self.want)
        bar = self.bar * LUCK if path == "torch" else self.bar
        assert 0 < error <= bar, f"{path}: {error} against {self.bar} of transformers"


@pytest.fixture(scope="module")
def few(exact: Logits, theirs: Logits, tokens: list[int]) -> Errors:
    return Errors(exact, theirs, make_prompts(tokens, FEW))


@pytest.fixture(scope="module")
def all_64(exact: Logits, theirs: Logits, tokens: list[int]) -> Errors:
    return Errors(exact, theirs, make_prompts(tokens))


@pytest.mark.parametrize("path", [PATHS[0], "torch"])
def test_logits_of_some_prompts_are_as_near_as_those_of_transformers(
    few: Errors, ours: Logits, path: str
) -> None:
    few.compare(ours, path)


@pytest.mark.deep
@pytest.mark.parametrize("path", PATHS)
def test_logits_of_all_prompts_are_as_near_as_those_of_transformers(
    all_64: Errors, ours: Logits, path: str
) -> None:
    all_64.compare(ours, path)


@pytest.mark.deep
@pytest.mark.parametrize("path", PATHS)
def test_the_perplexity_of_a_text_is_that_of_float32(
    exact_perplexity: float, ours: Logits, tokens: list[int]
) -> None:
    assert abs(perplexity(ours, tokens) / exact_perplexity - 1) < PERPLEXITY


def test_control_the_measure_sees_noise_and_no_constant(few: Errors) -> None:
    """A constant added to a row changes no probability."""
    generator = torch.Generator().manual_seed(0)
    moved = [logits + 3.0 for logits in few.want]
    assert rms_error(moved, few.want) < 1e-5
    noisy = [
        logits + 1.1 * few.bar * torch.randn(logits.shape, generator=generator) for logits in moved
    ]
    assert few.bar < rms_error(noisy, few.want) < 1.2 * few.bar
