"""The index over workers: the longest prefix of each, gaps, deaths, bounds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pagedkv.transfer.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
)
from pagedkv.transfer.prefix_index import WorkerPrefixes


def batch(*events: KVEvent) -> KVEventBatch:
    return KVEventBatch(0.0, [*events])


def stored(*names: bytes) -> BlockStored:
    return BlockStored([*names], None, [0] * len(names), 1, None, "GPU", None)


CLEARED = AllBlocksCleared()
A, B, C, D = b"a", b"b", b"c", b"d"


def test_each_worker_counts_as_far_as_it_has_every_block() -> None:
    index = WorkerPrefixes()
    index.store(0, [A, B, C])
    index.store(1, [A])
    index.store(2, [A, C, D])  # C is of no use without B
    index.store(4, [B, C, D])
    assert index.cached_blocks([A, B, C, D], 5).tolist() == [3, 1, 1, 0, 0]
    assert index.cached_blocks([], 5).tolist() == [0] * 5
    assert index.cached_blocks([A, B], 0).tolist() == []


def test_names_are_taken_only_as_far_as_they_are_found() -> None:
    index = WorkerPrefixes()
    index.store(0, [A, B])
    taken = []

    def names() -> Iterator[bytes]:
        for name in (A, B, C, D):
            taken.append(name)
            yield name

    assert index.cached_blocks(names(), 1).tolist() == [2]
    assert taken == [A, B, C]


def test_gap_in_the_numbers_forgets_the_worker_until_its_next_picture() -> None:
    index = WorkerPrefixes()
    assert index.apply(0, 0, batch(CLEARED, stored(A)))
    assert index.apply(0, 1, batch(stored(B)))
    assert not index.apply(0, 3, batch(stored(C)))
    assert not index.follows(0)
    assert len(index) == 0
    assert not index.apply(0, 4, batch(stored(D)))  # in order again, and what is missing is missing
    assert len(index) == 0
    assert index.apply(0, 5, batch(CLEARED, stored(A, B, C)))
    assert index.cached_blocks([A, B, C], 1).tolist() == [3]


def test_gap_a_stream_that_is_first_heard_in_its_middle_is_not_trusted() -> None:
    index = WorkerPrefixes()
    assert not index.apply(0, 7, batch(stored(A)))
    assert index.num_blocks(0) == 0


def test_late_and_repeated_batches_change_nothing() -> None:
    index = WorkerPrefixes()
    index.apply(0, 0, batch(CLEARED, stored(A)))
    index.apply(0, 1, batch(BlockRemoved([A], "GPU")))
    assert index.apply(0, 0, batch(CLEARED, stored(A)))
    assert index.apply(0, 1, batch(stored(B)))
    assert len(index) == 0
    assert index.apply(0, 2, batch(stored(C)))
    assert index.num_blocks(0) == 1


def test_blocks_stored_twice_or_removed_unknown_do_no_harm() -> None:
    index = WorkerPrefixes()
    index.store(0, [A, A])
    index.store(0, [A])
    index.remove(0, [B])
    index.remove(1, [A])
    assert index.num_blocks(0) == 1
    index.remove(0, [A, A])
    assert len(index) == 0


def test_bound_names_past_it_are_not_remembered_and_shorten_the_prefix() -> None:
    index = WorkerPrefixes(blocks_a_worker=2)
    index.store(0, [A, B, C])
    assert (index.num_blocks(0), index.dropped) == (2, 1)
    assert index.cached_blocks([A, B, C], 1).tolist() == [2]
    index.remove(0, [A])
    index.store(0, [D])
    assert (index.num_blocks(0), index.dropped) == (2, 1)
    with pytest.raises(ValueError, match="blocks_a_worker=0"):
        WorkerPrefixes(0)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_it_equals_a_set_for_each_worker(seed: int) -> None:
    rng = np.random.default_rng(seed)
    index, workers, seqs = WorkerPrefixes(), [set[bytes]() for _ in range(70)], [0] * 70
    names = [bytes([i]) for i in range(12)]
    for i in range(70):
        index.apply(i, 0, batch(CLEARED))
    for _ in range(2000):
        i = int(rng.integers(70))
        some = [names[j] for j in rng.choice(12, rng.integers(1, 5), replace=False)]
        act = rng.integers(20)
        seqs[i] += 1
        if act < 12:
            workers[i].update(some)
            assert index.apply(i, seqs[i], batch(stored(*some)))
        elif act < 18:
            workers[i].difference_update(some)
            assert index.apply(i, seqs[i], batch(BlockRemoved(some, "GPU")))
        else:
            workers[i] = set(some)
            assert index.apply(i, seqs[i], batch(CLEARED, stored(*some)))
        assert len(index) == len(set().union(*workers))
        prompt = [names[j] for j in rng.permutation(12)]
        depths = [next((d for d, n in enumerate(prompt) if n not in w), 12) for w in workers]
        assert index.cached_blocks(prompt, 70).tolist() == depths
