"""Pools that resist scans as they are (64 blocks and more) agree with the reference model."""

from __future__ import annotations

import pytest
from cache_program import CacheProgram

from pagedkv.cache.evict import PROTECTED_SHARE, SCAN_RESISTANT_FROM

VERBS = (
    ("open", 20),
    ("reserve", 26),
    ("commit", 26),
    ("close", 20),
    ("match", 3),
    ("cancel", 2),
    ("fork", 2),
    ("truncate", 2),
    ("lease", 1),
    ("end_lease", 2),
    ("migrate", 1),
    ("restart", 1),
)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(SCAN_RESISTANT_FROM, 1), (70, 3)])
def test_hot_prefixes_among_one_off_prompts(num_blocks: int, block_size: int) -> None:
    """A few prompts come again and again, in part or with more behind them; most come once."""
    program = CacheProgram(1, num_blocks, block_size)
    program.alphabet = 40
    hot = [program.tokens(6 * block_size) for _ in range(5)]
    names, weights = zip(*VERBS, strict=True)
    most_protected = most_ghosts = 0
    for _ in range(700):
        once = program.tokens(program.random.randint(1, 9 * block_size))
        program.prompts = [program.random.choice(hot), once]
        getattr(program, program.random.choices(names, weights)[0])()
        program.compare()
        most_protected = max(most_protected, len(program.model.protected))
        most_ghosts = max(most_ghosts, len(program.model.ghosts))
    program.finish()
    assert most_protected == num_blocks // PROTECTED_SHARE, "the protected ring never was full"
    assert most_ghosts > 10, "hardly anything was evicted"
