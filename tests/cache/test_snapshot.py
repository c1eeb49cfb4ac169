"""Snapshots are total and guarded; state keys are equal exactly for states that behave alike."""

import json

import pytest
from cache_helpers import close_all, grow, remember, write

from pagedkv.cache import BlockManager


def busy() -> BlockManager:
    """Everything at once: names, forks, a pending copy, a lease, cached and evicted blocks."""
    m = BlockManager(12, 2, max_seqs=6, max_blocks_per_seq=10)
    remember(m, [1, 2, 3, 4, 5], namespace="a", public=2)
    remember(m, [8, 8, 8])
    a = write(m, [1, 2, 3, 7, 7], namespace=b"\xff", extra=b"x", public=4)
    m.fork(a)
    m.reserve([a], [2])
    m.lease(m.block_table(a)[:1])
    m.evict(1)
    return m


def empty(m: BlockManager) -> None:
    for lease in list(m.leases):
        m.end_lease(lease)
    close_all(m, *(m.table.seq(row) for row in m.table.open_rows().tolist()))


def test_a_restored_manager_is_the_same_manager() -> None:
    m = busy()
    twin = BlockManager.restore(m.snapshot())
    twin.check()
    assert twin.snapshot() == m.snapshot()
    seqs = [m.table.seq(row) for row in m.table.open_rows().tolist()]
    for manager in (m, twin):
        manager.commit(seqs[:1], [[4, 4]])
        manager.fork(seqs[1])
        manager.end_lease(1)
        manager.evict(2)
    assert twin.snapshot() == m.snapshot()
    empty(m)
    empty(twin)


def test_snapshots_of_different_times_do_not_share_memory() -> None:
    m = BlockManager(4, 2)
    before = m.snapshot()
    twin = BlockManager.restore(before)
    remember(m, [1, 2, 3])
    assert twin.snapshot() == before


@pytest.mark.parametrize("where", [0, 7, 8, 11, 12, 40, -1])
def test_a_damaged_byte_is_noticed(where: int) -> None:
    m = busy()
    data = bytearray(m.snapshot())
    data[where] ^= 1
    with pytest.raises(ValueError, match=r"truncated or damaged|not a b'pkvsnap2' record"):
        BlockManager.restore(bytes(data))
    empty(m)


@pytest.mark.parametrize("kept", [0, 3, 8, 11, 12, 100])
def test_a_truncated_snapshot_is_noticed(kept: int) -> None:
    m = busy()
    with pytest.raises(ValueError, match=r"truncated or damaged|not a b'pkvsnap2' record"):
        BlockManager.restore(m.snapshot()[:kept])
    empty(m)


def test_another_kind_or_version_is_refused() -> None:
    m = BlockManager(4, 2)
    seq = write(m, [1, 2, 3])
    for foreign in (b"pkvsnap1" + m.snapshot()[8:], m.export_sequence(seq), b"PK\x03\x04"):
        with pytest.raises(ValueError, match="not a b'pkvsnap2' record"):
            BlockManager.restore(foreign)
    m.close(seq)


def test_a_snapshot_is_no_pickle() -> None:
    m = busy()
    body = m.snapshot()[12:]
    size = int.from_bytes(body[:4], "little")
    assert json.loads(body[4 : 4 + size])["facts"]["block_size"] == 2
    empty(m)


def test_equal_states_under_other_ids_have_equal_keys() -> None:
    """The same life after rows, blocks, serials, stamps and leases were used up before."""

    def live(m: BlockManager) -> bytes:
        remember(m, [5, 6, 7])
        a = write(m, [1, 2, 3, 4, 5], namespace="t")
        m.fork(a)
        m.reserve([a], [3])
        m.lease(m.block_table(a)[:2])
        return m.state_key()

    fresh, used = BlockManager(12, 2, max_seqs=4), BlockManager(12, 2, max_seqs=4)
    others = [used.open() for _ in range(3)]
    remember(used, range(20, 30))
    used.lease([]).release()
    close_all(used, *others)
    used.reset_cache()
    assert used.state_key() == fresh.state_key()
    assert live(used) == live(fresh)
    assert used.snapshot() != fresh.snapshot()
    empty(fresh)
    empty(used)


def _content(m: BlockManager) -> None:
    remember(m, [1, 2])
    remember(m, [3, 4])


DIFFERENT = {
    "nothing more": lambda m: None,
    "order": lambda m: remember(m, [1, 2, 0]) and m.evict(0),
    "one name less": lambda m: m.evict(1),
    "another name": lambda m: remember(m, [3, 5]),
    "an empty sequence": lambda m: m.open(),
    "of a tenant": lambda m: m.open(namespace="a"),
    "of another tenant": lambda m: m.open(namespace="b"),
    "with extra": lambda m: m.open(extra=b"a"),
    "a hit": lambda m: m.open([1, 2, 9]),
    "a part of a hit": lambda m: m.open([1, 9]),
    "computed itself": lambda m: grow(m, m.open(), [1, 2]),
    "public": lambda m: m.open([1, 2, 9], public=1),
    "a reservation": lambda m: m.reserve([m.open([1, 2, 9])], [1]),
    "a longer reservation": lambda m: m.reserve([m.open([1, 2, 9])], [2]),
    "an empty reservation": lambda m: m.reserve([m.open([1, 2, 9])], [0]),
    "two sequences": lambda m: m.fork(m.open([1, 2, 9])),
    "a lease": lambda m: m.lease([1]),
    "two leases": lambda m: (m.lease([1]), m.lease([1])),
    "a wider lease": lambda m: m.lease([1, 2]),
}


def test_states_that_behave_differently_have_different_keys() -> None:
    keys: dict[bytes, str] = {}
    for what, change in DIFFERENT.items():
        m = BlockManager(8, 2)
        _content(m)
        change(m)
        assert m.state_key() not in keys, f"{what} and {keys[m.state_key()]} have the same key"
        keys[m.state_key()] = what
        empty(m)


def test_managers_of_another_shape_have_different_keys() -> None:
    shapes = [(4, 2), (5, 2), (4, 3), (4, 2, False), (4, 2, True, 9), (4, 2, True, 256, 3)]
    assert len({BlockManager(*shape).state_key() for shape in shapes}) == len(shapes)
