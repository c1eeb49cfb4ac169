"""`deterministic=True`: logits are bit-identical whatever the batch, chunking and block size."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import numpy as np
import pytest
import torch
from paged_driver import PagedDriver
from tiny_models import VOCAB, save_tiny

from pagedkv.models import Decoder, load_model


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["llama-head-dim", "qwen2", "qwen3"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, folder)
    return folder


LENGTHS = (1, 2, 7, 16, 17, 33, 40, 5)


def alone(decoder: Decoder, prompt: list[int]) -> torch.Tensor:
    return PagedDriver(decoder, 16, backend="native", num_seqs=1).step([(0, prompt)])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_batch_chunking_block_size_or_threads(folder, dtype) -> None:
    decoder = load_model(folder, dtype=dtype, deterministic=True).decoder
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]
    torch.set_num_threads(1)
    want = [alone(decoder, prompt) for prompt in prompts]
    for threads, block_size, chunks in (
        (2, 16, (40,)),
        (1, 16, (1,)),
        (1, 3, (1, 2, 5, 7)),
        (2, 1, (17, 4)),
    ):
        torch.set_num_threads(threads)
        order = rng.permutation(len(prompts))
        driver = PagedDriver(decoder, block_size, backend="native")
        got = driver.teacher_force([prompts[i] for i in order], cycle(chunks))
        for i, logits in zip(order, got, strict=True):
            assert torch.equal(logits, want[i]), (threads, block_size, chunks, LENGTHS[i])


def test_a_row_of_logits_does_not_depend_on_the_other_wanted_rows(folder) -> None:
    decoder = load_model(folder, deterministic=True).decoder
    prompt = list(range(40))
    want = alone(decoder, prompt)
    for rows in ([39], [5, 39], [39, 0, 7], list(range(20, 40))):
        driver = PagedDriver(decoder, 16, backend="native")
        assert torch.equal(driver.logits([(0, prompt)], rows=rows), want[rows])


def test_a_row_may_be_wanted_more_often_than_there_are_tokens(folder) -> None:
    decoder = load_model(folder, deterministic=True).decoder
    want = alone(decoder, [5])
    driver = PagedDriver(decoder, 16, backend="native")
    got = driver.logits([(0, [5])], rows=[0] * 500)
    assert torch.equal(got, want.expand_as(got))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_64_rows_are_those_that_each_would_be_alone(folder, dtype) -> None:
    """Prefills, then decodes; half of the sequences go on from blocks that they share."""
    decoder = load_model(folder, dtype=dtype, deterministic=True).decoder
    rng = np.random.default_rng(1)
    common = rng.integers(0, VOCAB, 48).tolist()
    prompts = [
        [*(common if i % 2 else []), *rng.integers(0, VOCAB, 1 + i % 23).tolist()]
        for i in range(64)
    ]
    torch.set_num_threads(1)
    want = [alone(decoder, prompt) for prompt in prompts]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        driver = PagedDriver(decoder, 16, backend="native", num_seqs=len(prompts))
        driver.step([(1, common)])
        for seq in range(3, len(prompts), 2):
            driver.tables[seq, :3] = driver.tables[1, :3]
            driver.lengths[seq] = len(common)
        new = [prompt[driver.lengths[seq] :] for seq, prompt in enumerate(prompts)]
        prefills = {seq: tokens[:-1] for seq, tokens in enumerate(new) if len(tokens) > 1}
        for batch in (prefills, {seq: tokens[-1:] for seq, tokens in enumerate(new)}):
            starts = driver.lengths.copy()
            for seq, logits in zip(batch, driver.step(list(batch.items())), strict=True):
                rows = slice(starts[seq], starts[seq] + len(logits))
                assert torch.equal(logits, want[seq][rows]), (threads, seq)
