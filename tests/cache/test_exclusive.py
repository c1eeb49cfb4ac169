"""Blocks that closing sequences releases: counted beforehand, compared with what closing does."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.cache import BlockManager


@given(
    stems=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 11)), min_size=1, max_size=6),
    forks=st.lists(st.integers(0, 5), max_size=3),
    caching=st.booleans(),
    groups=st.lists(st.lists(st.integers(0, 8), max_size=4, unique=True), min_size=1, max_size=4),
)
def test_as_many_as_closing_releases(
    stems: list[tuple[int, int]], forks: list[int], caching: bool, groups: list[list[int]]
) -> None:
    manager = BlockManager(64, 3, prefix_caching=caching, max_seqs=16)
    seqs = []
    for stem, length in stems:
        tokens = [stem] * length
        seq = manager.open(tokens)
        rest = tokens[manager.length(seq) :]
        manager.reserve([seq], [len(rest)])
        manager.commit([seq], [rest])
        seqs.append(seq)
    seqs += [manager.fork(seqs[i % len(stems)])[0] for i in forks]
    named = [[seqs[i] for i in group if i < len(seqs)] for group in groups]
    before = manager.snapshot()
    counted = manager.exclusive_blocks(named)
    assert manager.snapshot() == before and counted.dtype == np.int64
    for group, count in zip(named, counted.tolist(), strict=True):
        copy = BlockManager.restore(before)
        for seq in group:
            copy.close(seq)
        assert manager.num_held_blocks - copy.num_held_blocks == count
        for seq in set(seqs) - set(group):
            copy.close(seq)
    for seq in seqs:
        manager.close(seq)


def test_of_no_groups_and_of_empty_ones() -> None:
    manager = BlockManager(4, 2)
    assert manager.exclusive_blocks([]).tolist() == []
    assert manager.exclusive_blocks([[], []]).tolist() == [0, 0]
