"""Logits through a paged cache against transformers, for a tiny model of every family."""

from __future__ import annotations

from itertools import cycle
from typing import NamedTuple

import numpy as np
import pytest
import torch
from paged_driver import PagedDriver
from tiny_llm import save_tiny_llm
from tiny_models import TINY, VOCAB, save_tiny

from pagedkv.models import Decoder, load_model

TOLERANCE = 1e-3
pytestmark = pytest.mark.parity


# What computes the layers, and attention: the default, all of it in torch, and a mixture.
PATHS = {"fast": ("auto", "native"), "torch": ("torch", "gather"), "mixed": ("native", "gather")}


class Ours(NamedTuple):
    """Our model, and the attention backend that its path goes with."""

    decoder: Decoder
    backend: str

    def driver(self, block_size: int, **sizes: int) -> PagedDriver:
        return PagedDriver(self.decoder, block_size, self.backend, **sizes)


@pytest.fixture(scope="module", params=[*sorted(TINY), "with-tokenizer"])
def saved(request, tmp_path_factory):
    """transformers' model, and the folder it was saved in."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = save_tiny(request.param, folder) if request.param in TINY else save_tiny_llm(folder)
    return theirs, folder


@pytest.fixture(scope="module", params=PATHS)
def pair(request, saved):
    """transformers' model, and ours loaded from its folder."""
    theirs, folder = saved
    kernels, backend = PATHS[request.param]
    loaded = load_model(folder, kernels=kernels)
    assert (loaded.tokenizer is not None) == (folder / "tokenizer.json").exists()
    return theirs, Ours(loaded.decoder, backend)


def expected(model, tokens) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0].float()


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_prompts_of_every_length_to_four_blocks_and_one_token(pair, block_size: int) -> None:
    theirs, ours = pair
    longest = tokens(4 * block_size + 1)
    want = expected(theirs, longest)
    driver = ours.driver(block_size, num_seqs=len(longest), max_len=len(longest))
    prompts = [longest[:length] for length in range(1, len(longest) + 1)]
    for length, got in enumerate(driver.teacher_force(prompts, cycle([len(longest)])), 1):
        assert difference(got, want[:length]) < TOLERANCE


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("chunks", [(1,), (1, 2, 5, 7), (17, 4)])
def test_mixed_batches_in_chunks_that_do_not_divide_a_block(pair, block_size, chunks) -> None:
    theirs, ours = pair
    lengths = (1, block_size, 2 * block_size + 1, 4 * block_size + 1)
    prompts = [tokens(length, seed) for seed, length in enumerate(lengths)]
    driver = ours.driver(block_size)
    for prompt, got in zip(prompts, driver.teacher_force(prompts, cycle(chunks)), strict=True):
        assert difference(got, expected(theirs, prompt)) < TOLERANCE


def test_only_the_wanted_rows_get_logits(pair) -> None:
    _, ours = pair
    want = ours.driver(4).step([(0, tokens(9))])[0]
    for rows in ([], [8], [5, 2]):
        got = ours.driver(4).logits([(0, tokens(9))], rows=rows)
        assert difference(got, want[rows]) < TOLERANCE if rows else got.shape == (0, want.shape[1])


# The controls: each damage must be seen, or the tests above would prove nothing. Attention over a
# whole context does not depend on the order of its keys (each key carries its position), so an
# exchange of two full blocks is seen where a query stands before the end of the table, or where
# one of the two blocks is only partly filled.

BLOCK = 4
VISIBLE = 100 * TOLERANCE


def prefilled(ours: Ours, prompt: list[int]) -> PagedDriver:
    driver = ours.driver(BLOCK)
    driver.step([(0, prompt)])
    return driver


def swap(driver: PagedDriver, first: int, second: int) -> None:
    driver.tables[0, [first, second]] = driver.tables[0, [second, first]]


def test_control_swapped_full_blocks_are_seen_by_a_chunk(pair) -> None:
    _, ours = pair
    prompt = tokens(3 * BLOCK)
    want = ours.driver(BLOCK).step([(0, prompt)])[0][BLOCK:]
    driver = prefilled(ours, prompt)
    swap(driver, 0, 2)
    driver.lengths[0] = BLOCK  # compute the last two blocks again, over the damaged table
    assert difference(driver.step([(0, prompt[BLOCK:])])[0], want) > VISIBLE


def test_control_a_tail_swapped_with_a_full_block_is_seen_by_a_decode(pair) -> None:
    _, ours = pair
    prompt = tokens(2 * BLOCK + 2)
    want = prefilled(ours, prompt).step([(0, [5])])[0]
    driver = prefilled(ours, prompt)
    swap(driver, 0, 2)
    assert difference(driver.step([(0, [5])])[0], want) > VISIBLE


def test_control_a_shifted_position_is_seen(pair) -> None:
    _, ours = pair
    prompt = tokens(2 * BLOCK + 2)
    want = prefilled(ours, prompt).step([(0, [5])])[0]
    got = prefilled(ours, prompt).step([(0, [5])], position_shift=1)[0]
    assert difference(got, want) > VISIBLE


@pytest.mark.parametrize("half", [0, 1], ids=["key", "value"])
def test_control_a_zeroed_slot_is_seen(pair, half: int) -> None:
    _, ours = pair
    prompt = tokens(2 * BLOCK + 2)
    want = prefilled(ours, prompt).step([(0, [5])])[0]
    worst = 0.0
    for position in range(len(prompt)):
        driver = prefilled(ours, prompt)
        block = driver.tables[0, position // BLOCK : position // BLOCK + 1]
        data = driver.backend.read_blocks(block)
        data[:, :, half, position % BLOCK] = 0
        driver.backend.write_blocks(block, data)
        worst = max(worst, difference(driver.step([(0, [5])])[0], want))
    assert worst > VISIBLE
