"""Where new tokens go: in place, or to a copy. Small inputs for each point of the rule."""

import pytest
from cache_helpers import close_all, grow, refused, remember, write

from pagedkv.cache import BlockManager, OutOfBlocks


def tail(m: BlockManager, seq: int) -> int:
    return int(m.block_table(seq)[-1])


def test_a_lone_writer_writes_in_place() -> None:
    m = BlockManager(4, 4)
    seq = write(m, [1, 2, 3])
    r = m.reserve([seq], [1])
    assert r.copies.tolist() == []
    assert r.slots.tolist() == [tail(m, seq) * 4 + 3]
    m.commit([seq], [[4]])
    m.close(seq)


def test_a_published_tail_that_ends_at_the_writer_loses_its_name_and_is_written_in_place() -> None:
    m = BlockManager(4, 4)
    remember(m, [1, 2, 3])
    seq = m.open([1, 2, 3, 4])
    assert m.reserve([seq], [1]).copies.tolist() == []
    assert m.match([1, 2, 3, 9]).cached_tokens == 0
    m.cancel([seq])  # withdrawn names do not come back
    assert m.match([1, 2, 3, 9]).cached_tokens == 0
    m.close(seq)
    assert m.match([1, 2, 3, 9]).cached_tokens == 3  # published anew by its last holder


def test_a_published_tail_that_goes_on_is_copied() -> None:
    m = BlockManager(4, 4)
    remember(m, [1, 2, 3])
    seq = m.open([1, 2, 8])
    source = tail(m, seq)
    r = m.reserve([seq], [1])
    assert r.copies.tolist() == [[source, tail(m, seq), 2]]
    assert m.refcount(source) == 1 and m.num_held_blocks == 2  # the source counts until the end
    m.commit([seq], [[8]])
    assert m.refcount(source) == 0 and m.num_cached_blocks == 1
    assert m.match([1, 2, 3, 9]).cached_tokens == 3
    m.close(seq)


def test_of_forks_that_all_write_the_longest_keeps_the_block_and_of_equals_the_last() -> None:
    m = BlockManager(8, 4)
    a = write(m, [1, 2, 3])
    b, c, d = m.fork(a, 3)
    m.truncate(d, 1)
    shared = tail(m, a)
    r = m.reserve([a, c, b, d], [1, 1, 1, 1])
    assert tail(m, b) == shared
    assert [row[0] for row in r.copies.tolist()] == [shared] * 3
    assert [row[2] for row in r.copies.tolist()] == [3, 3, 1]
    assert [row[1] for row in r.copies.tolist()] == [tail(m, s) for s in (a, c, d)]
    m.cancel([a, c, b, d])
    assert m.refcount(shared) == 4
    close_all(m, a, b, c, d)


def test_a_fork_that_does_not_write_forces_a_copy() -> None:
    m = BlockManager(4, 4)
    a = write(m, [1, 2, 3])
    (b,) = m.fork(a)
    shared = tail(m, a)
    assert m.reserve([a, b], [1, 0]).copies.tolist() == [[shared, tail(m, a), 3]]
    m.cancel([a, b])
    close_all(m, a, b)


def test_a_copy_source_of_another_reservation_is_not_overwritten() -> None:
    m = BlockManager(6, 4)
    a = write(m, [1, 2, 3])
    (b,) = m.fork(a)
    shared = tail(m, a)
    m.reserve([a], [1])  # a copies from the block that only b names now
    assert m.reserve([b], [1]).copies.tolist() == [[shared, tail(m, b), 3]]
    m.cancel([a])
    assert tail(m, a) == shared
    m.cancel([b])
    close_all(m, a, b)


def test_a_lease_on_the_tail_forces_a_copy() -> None:
    m = BlockManager(4, 4)
    a = write(m, [1, 2, 3])
    with m.lease(m.block_table(a)):
        assert len(m.reserve([a], [1]).copies) == 1
        m.cancel([a])
    assert len(m.reserve([a], [1]).copies) == 0
    m.close(a)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("spare", [0, 1, 2])
def test_under_shortage_names_are_withdrawn_in_call_order_as_many_as_needed(
    first: int, spare: int
) -> None:
    m = BlockManager(2 + spare, 2)
    seqs = [write(m, [1, 2]), write(m, [3, 4])]
    for seq in seqs:
        m.truncate(seq, 1)
    order = [seqs[first], seqs[1 - first]]
    blocks = [tail(m, seq) for seq in order]
    copies = m.reserve(order, [1, 1]).copies.tolist()
    assert [row[0] for row in copies] == blocks[2 - spare :]
    assert [tail(m, seq) for seq in order][: 2 - spare] == blocks[: 2 - spare]
    m.cancel(order)
    close_all(m, *seqs)


def test_a_shared_tail_may_be_overwritten_by_one_of_its_writers_under_shortage() -> None:
    """Two sequences of one token each in a named block of two: P=2 holds both, cold or warm."""
    m = BlockManager(2, 2)
    a = write(m, [1, 2])
    m.truncate(a, 1)
    (b,) = m.fork(a)
    assert len(m.reserve([a, b], [1, 1]).copies) == 1
    m.commit([a, b], [[5], [6]])
    close_all(m, a, b)


def test_a_hit_never_needs_more_blocks_than_a_cold_run() -> None:
    """The whole pool is one finished prompt; every prompt of its size still fits."""
    for shared in range(9):
        m = BlockManager(2, 4)
        remember(m, range(8))
        seq = write(m, [*range(shared), *[99] * (8 - shared)])
        assert m.length(seq) == 8
        m.close(seq)


def test_hits_are_not_evicted_for_the_same_call() -> None:
    m = BlockManager(3, 4)
    remember(m, range(12))
    seq = m.open([*range(8), 90, 91, 92, 93])
    hits = m.block_table(seq).tolist()
    m.reserve([seq], [4])
    assert m.block_table(seq).tolist()[:2] == hits and len(set(m.block_table(seq).tolist())) == 3
    m.cancel([seq])
    m.close(seq)


def test_all_or_nothing_over_all_sequences_of_a_call() -> None:
    m = BlockManager(3, 2)
    a, b = write(m, [1, 2]), write(m, [3, 4])
    with refused(m, OutOfBlocks, "2 blocks needed, 1 free and 0 cached"):
        m.reserve([a, b], [1, 1])
    assert not m.can_reserve([a, b], [1, 1]) and m.can_reserve([a], [1])
    assert m.demand([a, b], [1, 2]) == 2
    close_all(m, a, b)


def test_commit_of_fewer_gives_back_the_rest_and_cancel_all() -> None:
    m = BlockManager(4, 2)
    seq = write(m, [1])
    for k, j in ((7, 0), (7, 2), (4, 4)):
        m.reserve([seq], [k])
        assert m.tables([seq]).lengths.tolist() == [m.length(seq) + k]
        m.commit([seq], [[5] * j])
        assert len(m.block_table(seq)) == -(-m.length(seq) // 2)
    before = m.block_table(seq).tolist()
    m.reserve([seq], [1])
    m.cancel([seq])
    assert m.block_table(seq).tolist() == before and m.length(seq) == 7
    m.close(seq)


def test_equal_blocks_computed_twice_are_stored_once() -> None:
    m = BlockManager(8, 2)
    a, b = m.open([1, 2, 3]), m.open([1, 2, 3])
    m.reserve([a, b], [3, 3])
    since = m.stamp()
    m.commit([a, b], [[1, 2, 3], [1, 2, 3]])
    assert m.block_table(a)[0] == m.block_table(b)[0]
    assert m.block_table(a)[1] != m.block_table(b)[1]  # tails stay apart while one may append
    assert m.changed_rows(since).tolist() == m.rows([b]).tolist()  # only its entry has moved
    m.close(a)
    m.close(b)  # the tail's name exists by now: the own copy is freed
    assert (m.num_cached_blocks, m.num_free_blocks) == (2, 6)


def test_truncate_and_close_cancel_first() -> None:
    m = BlockManager(4, 2)
    a = write(m, [1, 2, 3])
    m.reserve([a], [3])
    m.truncate(a, 2)
    assert m.block_table(a).tolist() == [1] and m.length(a) == 2
    m.reserve([a], [3])
    m.close(a)
    assert (m.num_cached_blocks, m.num_free_blocks) == (1, 3)


def test_truncate_publishes_nothing() -> None:
    m = BlockManager(4, 4)
    a = write(m, [1, 2, 3])
    m.truncate(a, 2)
    assert m.match([1, 2, 9]).cached_tokens == 0
    grow(m, a, [4])
    m.close(a)
    assert m.match([1, 2, 4, 9]).cached_tokens == 3
