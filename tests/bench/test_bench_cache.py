"""The pool that the cache is measured in: full, and as it was left."""

from __future__ import annotations

import pytest

from pagedkv.bench.cache import decoding, measure_cache
from pagedkv.errors import ConfigError


def test_the_pool_is_full_and_sequences_have_room() -> None:
    manager, seqs = decoding(300, 4, 3, longest=512)
    assert manager.num_free_blocks == 0
    assert manager.num_open_sequences == 3
    assert all(200 <= manager.length(seq) < 300 for seq in seqs)
    manager.check()
    for seq in seqs:
        manager.close(seq)


def test_every_round_evicts_a_block_for_each_sequence() -> None:
    times = measure_cache(2, 400, 4, rounds=5, prompt_len=40)
    assert times.cached_tokens == 39
    # 2 sequences in 5 rounds and a warm-up; the prompt once more if it was gone; copied tails.
    assert times.evicted_blocks >= 2 * 6
    assert min(times.decode_us, times.open_us, times.close_us, times.fork_us) > 0


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ((0, 400, 4), "num_seqs=0"),
        ((2, 0, 4), "num_blocks=0"),
        ((2, 400, 0), "block_size=0"),
        ((2, 100, 4), r"num_blocks=100: 2 sequences of up to 384 tokens and a prompt of 1024"),
    ],
)
def test_what_cannot_be_measured(numbers: tuple[int, int, int], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        measure_cache(*numbers)
