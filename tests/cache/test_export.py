"""The batch's tables in the forms that kernels take."""

import numpy as np
import pytest
from cache_helpers import close_all, refused, remember, write

from pagedkv.cache import BlockManager


def test_all_forms_say_the_same() -> None:
    m = BlockManager(16, 3)
    seqs = [write(m, range(100 * n, 101 * n)) for n in (0, 1, 3, 4, 7)]
    m.reserve(seqs[:1], [2])  # kernels see reserved tokens too
    t = m.tables(seqs)
    assert t.lengths.tolist() == [2, 1, 3, 4, 7] and t.lengths.dtype == np.int32
    padded, csr = t.padded(), t.csr()
    assert padded.dtype == np.int32 and padded.shape == (5, 3)
    slots = iter(t.slots().tolist())
    for i, seq in enumerate(seqs):
        table = m.block_table(seq).tolist()
        assert padded[i].tolist() == table + [0] * (3 - len(table))
        assert csr.indices[csr.indptr[i] : csr.indptr[i + 1]].tolist() == table
        own = [table[p // 3] * 3 + p % 3 for p in range(t.lengths[i])]
        assert [next(slots) for _ in own] == own
        pages = csr.indptr[i + 1] - csr.indptr[i]
        assert (pages - 1) * 3 + csr.last_page_len[i] == t.lengths[i]
    assert not list(slots) and t.slots().dtype == np.int64
    close_all(m, *seqs)


def test_an_empty_row_has_no_pages_and_a_full_last_page() -> None:
    m = BlockManager(2, 4)
    seq = m.open()
    csr = m.tables([seq]).csr()
    assert (csr.indptr.tolist(), csr.indices.tolist()) == ([0, 0], [])
    assert csr.last_page_len.tolist() == [4]
    assert m.tables([seq]).slots().tolist() == []
    m.close(seq)


def test_an_empty_batch() -> None:
    t = BlockManager(2, 4).tables([])
    assert t.padded().shape == (0, 0) and t.csr().indptr.tolist() == [0]
    assert t.slots().tolist() == [] and t.shared_prefixes() == []


def test_the_pad_of_the_last_call_counts() -> None:
    m = BlockManager(4, 1)
    seqs = [write(m, [1, 2]), write(m, [3])]
    t = m.tables(seqs)
    for pad in (0, 7, -1, 0):
        assert t.padded(pad)[1].tolist() == [m.block_table(seqs[1])[0], pad]
    close_all(m, *seqs)


def test_out_is_filled_and_its_rest_points_at_the_null_block() -> None:
    m = BlockManager(4, 2)
    seqs = [write(m, [1, 2, 3]), write(m, [4])]
    out = np.full((5, 4), 77, np.int32)
    t = m.tables(seqs, out=out)
    assert np.shares_memory(t.padded(), out)
    a, b = (m.block_table(seq).tolist() for seq in seqs)
    assert out[:2].tolist() == [[*a, 0, 0], [*b, 0, 0, 0]]
    assert (out[2:] == 77).all()
    assert t.csr().indices.tolist() == a + b
    for bad in (np.zeros((1, 4), np.int32), np.zeros((2, 1), np.int32), np.zeros((2, 2), np.int64)):
        with refused(m, ValueError, "out must be int32"):
            m.tables(seqs, out=bad)
    close_all(m, *seqs)


def test_tables_do_not_change_under_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDKV_SANITIZE", raising=False)  # to it, this is an error
    m = BlockManager(8, 2)
    seq = write(m, [1, 2, 3])
    t = m.tables([seq])
    before = t.padded().tolist(), t.csr(), t.slots().tolist()
    m.truncate(seq, 1)
    write_more = write(m, [9] * 8)
    assert (t.padded().tolist(), t.slots().tolist()) == (before[0], before[2])
    assert t.csr().indices.tolist() == before[1].indices.tolist()
    close_all(m, seq, write_more)


def test_shared_prefixes() -> None:
    m = BlockManager(32, 2)
    remember(m, range(8))
    seqs = [
        write(m, [*range(8), 50, 51]),
        write(m, [60, 61, 62]),
        write(m, [*range(4), 70, 71]),
        write(m, [*range(8), 80]),
        write(m, [60, 61, 99]),
        m.open(),
    ]
    found = [(g.members.tolist(), g.num_blocks) for g in m.tables(seqs).shared_prefixes()]
    assert found == [([0, 2, 3], 2), ([1, 4], 1)]
    close_all(m, *seqs)


def test_shared_tails_are_no_full_blocks() -> None:
    m = BlockManager(4, 4)
    a = write(m, [1, 2, 3])
    (b,) = m.fork(a)
    assert m.tables([a, b]).shared_prefixes() == []
    close_all(m, a, b)


def test_changed_rows_are_enough_to_keep_a_mirror() -> None:
    """A copy of the table on another device, fed with the changed rows only, never falls behind."""
    m = BlockManager(12, 2, max_seqs=4)
    mirror, since = np.zeros((4, 12), np.int32), 0

    def upload() -> int:
        nonlocal since
        rows = m.changed_rows(since)
        since = m.stamp()
        fresh = m.padded_rows(rows)
        mirror[rows, : fresh.shape[1]] = fresh
        for row in m.table.open_rows().tolist():
            table = m.block_table(m.table.seq(row)).tolist()
            assert mirror[row, : len(table)].tolist() == table
        return len(rows)

    a = write(m, [1, 2, 3])
    assert upload() == 1
    assert upload() == 0
    (b,) = m.fork(a)
    m.reserve([a, b], [1, 1])
    assert upload() == 2
    m.cancel([a])
    m.commit([b], [[4]])
    upload()
    m.truncate(a, 1)
    m.close(b)
    upload()
    c, d = m.open([1, 2, 3, 4]), m.open([1, 2, 3, 4])
    m.reserve([c, d], [4, 4])
    upload()
    m.commit([c, d], [[7, 7], [7, 7, 7]])
    upload()
    close_all(m, a, c, d)


def test_the_block_table_is_a_view_that_cannot_be_written() -> None:
    m = BlockManager(4, 2)
    seq = write(m, [1, 2, 3])
    view = m.block_table(seq)
    assert view.base is not None and view.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 3
    m.close(seq)
