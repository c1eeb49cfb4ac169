"""What an engine can do wrong with slots, copies and tables that were right: the sanitizer says it.

Every test is an engine's step: reserve, export, report, commit, with one slip in it.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cache_helpers import close_all, remember, write
from sanitizer_helpers import caught, sanitized

from pagedkv.cache import BlockManager, SeqId
from pagedkv.cache.errors import Misuse
from pagedkv.cache.sanitizer import Sanitizer

NO_COPIES = np.zeros((0, 3), np.int32)


def allocating(m: BlockManager, tokens: list[int]) -> SeqId:
    return write(m, tokens)


def releasing(m: BlockManager, *seqs: int) -> None:
    close_all(m, *seqs)


def watching(m: BlockManager) -> Sanitizer:
    assert m.sanitizer is not None
    return m.sanitizer


# ---- a step without a slip


def test_a_step_that_is_right() -> None:
    m = sanitized()
    s = write(m, [1, 2, 3])
    (t,) = m.fork(s)
    r = m.reserve([s, t], [1, 2])
    tables = m.tables([s, t])
    w = watching(m)
    w.check_copies(r.copies)
    w.check_writes([s, t], [1, 2], r.slots)
    tables.verify()
    w.check_reads([s, t], tables.lengths, tables.padded(-1))
    m.commit([s, t], [[4], [5, 6]])
    w.check_reads([s, t], [4, 5], m.tables([s, t]).padded())
    w.check_blocks(m.block_table(s))
    w.check()
    close_all(m, s, t)
    w.check_idle()


@pytest.mark.parametrize("tokens", [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]])
def test_blocks_may_be_filled_one_after_the_other(tokens: list[int]) -> None:
    m = sanitized()
    s = m.open([])
    m.reserve([s], [len(tokens)])
    for block in m.block_table(s).tolist():
        watching(m).check_fills([block])
    m.commit([s], [tokens])
    close_all(m, s)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_blocks_may_be_filled_in_any_order(order: tuple[int, ...]) -> None:
    """As they come from another worker."""
    m = sanitized()
    s = m.open([])
    for tokens in ([1, 2, 3, 4, 5], [6, 7, 8, 9]):  # the second time behind a part of a block
        m.reserve([s], [len(tokens)])
        blocks = m.block_table(s)[-3:]
        for i in order:
            watching(m).check_fills(blocks[[i]])
        m.commit([s], [tokens])
    close_all(m, s)


def test_what_was_filled_counts_for_its_reservation_alone() -> None:
    m = sanitized()
    s = m.open([])
    m.reserve([s], [5])
    watching(m).check_fills(m.block_table(s)[-1:])
    m.cancel([s])
    m.reserve([s], [5])
    watching(m).check_fills(m.block_table(s)[:-1])
    with caught(Misuse.PAST_EXTENT, seq=s, step=5):
        watching(m).check_reads([s], [5], m.tables([s]).padded())
    m.cancel([s])
    close_all(m, s)


def test_fewer_tokens_may_be_written_than_reserved() -> None:
    m = sanitized()
    s = m.open([1])
    r = m.reserve([s], [4])
    w = watching(m)
    w.check_writes([s], [3], r.slots[:3])
    w.check_reads([s], [3], m.tables([s]).padded())
    m.commit([s], [[1, 2]])
    m.close(s)


def test_a_step_that_failed_is_done_again() -> None:
    m = sanitized()
    s = m.open([1])
    w = watching(m)
    for _ in range(2):
        w.check_writes([s], [2], m.reserve([s], [2]).slots)
        m.cancel([s])
    w.check_writes([s], [2], m.reserve([s], [2]).slots)
    m.commit([s], [[1, 2]])
    m.close(s)


# ---- reading


def test_a_stale_row_that_leads_to_a_freed_block() -> None:
    """An engine that keeps a row of its padded table when the sequence was truncated."""
    m = sanitized()
    s = allocating(m, [1, 2, 3, 4])
    padded = m.tables([s]).padded()
    m.truncate(s, 1)
    m.reset_cache()
    other = allocating(m, [7])
    m.reserve([s], [2])
    with caught(Misuse.STALE_TABLE, block=2, seq=s, step=5) as found:
        watching(m).check_reads([s], [3], padded)
    assert found.functions("allocated")[0] == "allocating"  # by `other`, which has it now
    assert f"sequence {s} is read through block 2 at entry 1" in str(found.error)
    close_all(m, s, other)


def test_a_read_of_a_block_that_nobody_holds() -> None:
    m = sanitized()
    s = allocating(m, [1, 2, 3, 4])
    padded = m.tables([s]).padded()
    m.truncate(s, 2)
    m.reserve([s], [1])
    padded[0, 1] = 7
    with caught(Misuse.FREED_READ, block=7, seq=s, step=5):
        watching(m).check_reads([s], [3], padded)
    m.close(s)


def test_a_recycled_block_read_through_the_table_of_a_closed_sequence() -> None:
    m = sanitized()
    s = allocating(m, [1, 2, 3])
    padded = m.tables([s]).padded()
    releasing(m, s)
    m.reset_cache()
    other = allocating(m, [7, 8, 9])
    watching(m).begin_step(6)
    with caught(Misuse.FREED_READ, block=int(padded[0, 0]), seq=s, step=6) as found:
        watching(m).check_reads([s], [3], padded)
    assert found.functions("allocated in step 5")[0] == "allocating"
    assert found.functions("last released in step 5")[0] == "releasing"
    assert found.functions("closed in step 5")[0] == "releasing"
    assert f"held by sequences [{other}]" in str(found.error)
    m.close(other)


@pytest.mark.parametrize("committed", [False, True])
def test_a_read_past_what_is_there(committed: bool) -> None:
    m = sanitized()
    s = allocating(m, [1, 2, 3])
    if committed:  # reported writes do not count twice
        watching(m).check_writes([s], [1], m.reserve([s], [1]).slots)
        m.commit([s], [[4]])
    n = m.length(s)
    padded = np.zeros((1, 4), np.int32)
    padded[0, :2] = m.block_table(s)
    watching(m).check_reads([s], [n], padded)
    with caught(Misuse.PAST_EXTENT, seq=s, step=5) as found:
        watching(m).check_reads([s], [n + 1], padded)
    assert found.functions("table last changed")[0] == "allocating"
    m.close(s)


def test_a_row_that_takes_over_the_place_of_another_starts_empty() -> None:
    m = sanitized()
    s = m.open([1])
    watching(m).check_writes([s], [2], m.reserve([s], [2]).slots)
    m.close(s)
    again = m.open([1])
    with caught(Misuse.PAST_EXTENT, seq=again, step=5):
        watching(m).check_reads([again], [1], np.ones((1, 1), np.int32))
    m.close(again)


def test_a_table_too_narrow_for_what_is_read() -> None:
    m = sanitized()
    s = allocating(m, [1, 2, 3])
    with caught(Misuse.PAST_EXTENT, seq=s, step=5):
        watching(m).check_reads([s], [3], m.tables([s]).padded()[:, :1])
    m.close(s)


def test_a_read_of_reserved_slots_that_were_not_written() -> None:
    m = sanitized()
    s = allocating(m, [1, 2, 3])
    r = m.reserve([s], [3])
    watching(m).check_writes([s], [1], r.slots[:1])
    with caught(Misuse.PAST_EXTENT, seq=s, step=5):
        watching(m).check_reads([s], [5], m.tables([s]).padded())
    m.close(s)


# ---- exported tables


@pytest.mark.parametrize("form", ["verify", "padded", "csr", "slots", "shared_prefixes"])
def test_a_table_that_was_exported_changed_and_then_used(form: str) -> None:
    m = sanitized()
    s = allocating(m, [1, 2, 3])
    m.fork(s)
    tables = m.tables([s])
    getattr(tables, form)()
    watching(m).begin_step(6)
    m.reserve([s], [1])  # a copy: the last entry is another block
    with caught(Misuse.STALE_TABLE, block=2, seq=s, step=6) as found:
        getattr(tables, form)()
    name = "test_a_table_that_was_exported_changed_and_then_used"
    assert found.functions("was exported in step 5")[0] == name
    assert found.functions("table last changed in step 6")[0] == name
    for row in m.table.open_rows().tolist():
        m.close(m.table.seq(row))


def test_a_table_used_when_its_sequence_is_closed() -> None:
    m = sanitized()
    s = allocating(m, [1, 2, 3])
    tables = m.tables([s])
    releasing(m, s)
    again = allocating(m, [1])  # in the same row
    with caught(Misuse.STALE_TABLE, block=1, seq=s, step=5) as found:
        tables.padded()
    assert "and the sequence was closed since" in str(found.error)
    m.close(again)


def test_other_sequences_may_change_after_an_export() -> None:
    m = sanitized()
    s, t = allocating(m, [1, 2, 3]), allocating(m, [7])
    tables = m.tables([s])
    m.close(t)
    tables.verify()
    m.close(s)


# ---- writing


def test_a_write_to_a_block_that_a_fork_sees() -> None:
    """An engine that appends at the old place although it was given a copy."""
    m = sanitized()
    s = allocating(m, [1, 2, 3])
    (t,) = m.fork(s)
    r = m.reserve([s], [1])
    watching(m).check_copies(r.copies)
    with caught(Misuse.FOREIGN_WRITE, block=2, seq=s, step=5) as found:
        watching(m).check_writes([s], [1], np.array([2 * 2 + 1]))
    assert found.functions("allocated")[0] == "allocating"
    close_all(m, s, t)


def test_a_write_behind_the_place_in_a_block_that_nobody_else_sees() -> None:
    m = sanitized(block_size=4)
    s = allocating(m, [1])
    slot = int(m.reserve([s], [1]).slots[0])
    with caught(Misuse.FOREIGN_WRITE, block=1, seq=s, step=5):
        watching(m).check_writes([s], [1], np.array([slot + 1]))
    with caught(Misuse.SHARED_WRITE, block=1, seq=s, step=5):  # published: a hit would see it
        watching(m).check_writes([s], [1], np.array([slot - 1]))
    m.close(s)


def test_a_write_to_a_committed_slot_of_a_shared_block() -> None:
    m = sanitized()
    s = allocating(m, [1, 2])
    (t,) = m.fork(s)
    m.reserve([s], [1])
    with caught(Misuse.SHARED_WRITE, block=1, seq=s, step=5) as found:
        watching(m).check_writes([s], [1], np.array([3]))
    assert f"held by sequences [{s}, {t}]" in str(found.error)
    close_all(m, s, t)


def test_a_write_to_a_block_leased_after_it_was_reserved() -> None:
    m = sanitized()
    s = allocating(m, [1])
    r = m.reserve([s], [1])
    with m.lease([1]), caught(Misuse.SHARED_WRITE, block=1, seq=s, step=5):
        watching(m).check_writes([s], [1], r.slots)
    m.close(s)


@pytest.mark.parametrize("counts", [[1], [3], [-1]])
def test_a_write_of_more_than_was_reserved(counts: list[int]) -> None:
    m = sanitized()
    s = allocating(m, [1, 2])
    if counts == [3]:
        m.reserve([s], [2])
    with caught(Misuse.FOREIGN_WRITE, seq=s, step=5):
        watching(m).check_writes([s], counts, np.arange(counts[0]))
    m.close(s)


def test_two_sequences_that_write_each_others_slots() -> None:
    m = sanitized()
    s, t = m.open([1]), m.open([2])
    r = m.reserve([s, t], [1, 1])
    with caught(Misuse.FOREIGN_WRITE, block=2, seq=s, step=5):
        watching(m).check_writes([s, t], [1, 1], r.slots[::-1])
    close_all(m, s, t)


def test_a_write_by_a_closed_sequence() -> None:
    m = sanitized()
    s = allocating(m, [1])
    releasing(m, s)
    with caught(Misuse.FOREIGN_WRITE, seq=s, step=5) as found:
        watching(m).check_writes([s], [1], np.array([2]))
    assert found.functions("closed in step 5")[0] == "releasing"


def test_a_slot_written_twice_by_two_tokens() -> None:
    m = sanitized()
    s = m.open([1])
    r = m.reserve([s], [2])
    with caught(Misuse.SLOT_TWICE, block=1, step=5):
        watching(m).check_writes([s], [2], r.slots[[0, 0]])
    m.close(s)


@pytest.mark.parametrize("calls", [1, 2])
def test_a_row_that_is_twice_in_a_step(calls: int) -> None:
    m = sanitized()
    s = m.open([1])
    slots = m.reserve([s], [1]).slots
    with caught(Misuse.SLOT_TWICE, block=1, seq=s, step=5):
        if calls == 2:
            watching(m).check_writes([s], [1], slots)
            watching(m).check_writes([s], [1], slots)
        else:
            watching(m).check_writes([s, s], [1, 1], np.tile(slots, 2))
    m.close(s)


def test_a_slot_that_is_left_out() -> None:
    m = sanitized()
    s = m.open([1])
    r = m.reserve([s], [2])
    with caught(Misuse.SLOT_NEVER, block=1, seq=s, step=5):
        watching(m).check_writes([s], [2], r.slots[:1])
    m.close(s)


@pytest.mark.plants_faults
def test_a_token_committed_that_nobody_wrote() -> None:
    m = sanitized()
    s = m.open([1])
    r = m.reserve([s], [3])
    watching(m).check_writes([s], [1], r.slots[:1])
    with caught(Misuse.SLOT_NEVER, block=1, seq=s, step=5) as found:
        m.commit([s], [[1, 2, 3]])
    assert "position 1 was not written" in str(found.error)


@pytest.mark.plants_faults
def test_a_whole_row_committed_that_nobody_wrote() -> None:
    m = sanitized()
    s, t = m.open([1]), m.open([2])
    r = m.reserve([s, t], [1, 1])
    watching(m).check_writes([s], [1], r.slots[:1])
    with caught(Misuse.SLOT_NEVER, block=2, seq=t, step=5):
        m.commit([s, t], [[1], [2]])


# ---- copies and transfers


def _copying(m: BlockManager) -> tuple[SeqId, SeqId, np.ndarray]:
    s = allocating(m, [1, 2, 3])
    (t,) = m.fork(s)
    return s, t, m.reserve([t], [1]).copies


@pytest.mark.parametrize(
    ("change", "kind", "block"),
    [
        ([1, 0, 0], Misuse.FREED_READ, 3),  # from another block
        ([0, 1, 0], Misuse.FOREIGN_WRITE, 4),  # to another block
        ([0, 99, 0], Misuse.FOREIGN_WRITE, 102),  # out of the pool
        ([99, 0, 0], Misuse.FREED_READ, 101),
        ([-9, 0, 0], Misuse.FREED_READ, -7),
        ([0, 0, 1], Misuse.PAST_EXTENT, 2),  # more than is filled
        ([0, 0, -1], Misuse.SLOT_NEVER, 2),  # less than is filled
    ],
)
def test_a_copy_that_nobody_asked_for(change: list[int], kind: Misuse, block: int) -> None:
    m = sanitized()
    s, t, copies = _copying(m)
    seq = None if kind == Misuse.FOREIGN_WRITE else t
    with caught(kind, block=block, seq=seq, step=5):
        watching(m).check_copies(copies + np.array(change, np.int32))
    close_all(m, s, t)


def test_a_copy_that_is_made_twice() -> None:
    m = sanitized()
    s, t, copies = _copying(m)
    watching(m).check_copies(copies)
    with caught(Misuse.FOREIGN_WRITE, block=3, step=5):
        watching(m).check_copies(copies)
    close_all(m, s, t)


def test_a_write_behind_a_copy_that_was_not_made() -> None:
    m = sanitized()
    s, t, _ = _copying(m)
    slots = m.tables([t]).slots()[-1:]
    with caught(Misuse.SLOT_NEVER, block=2, seq=t, step=5) as found:
        watching(m).check_copies(NO_COPIES)
        watching(m).check_writes([t], [1], slots)
    assert "a copy of block 2 that was not made" in str(found.error)
    close_all(m, s, t)


def test_a_transfer_of_a_block_that_nobody_holds() -> None:
    """The lease ended before the copy out of the pool did."""
    m = sanitized()
    remember(m, [1, 2])
    with m.lease([1]):
        watching(m).check_blocks(np.array([1], np.int32))
    with caught(Misuse.FREED_READ, block=1, step=5) as found:
        watching(m).check_blocks(np.array([1], np.int32))
    assert found.functions("last released")[0] == "test_a_transfer_of_a_block_that_nobody_holds"


@pytest.mark.parametrize("block", [-1, 99])
def test_a_transfer_of_a_block_that_the_pool_does_not_have(block: int) -> None:
    m = sanitized()
    s = m.open(list(range(m.num_blocks * m.block_size)))
    m.reserve([s], [m.num_blocks * m.block_size])  # block -1 would be one that is held
    with caught(Misuse.FREED_READ, block=block, step=5) as found:
        watching(m).check_blocks(np.array([block], np.int32))
    assert f"block {block}: not in the pool" in str(found.error)
    close_all(m, s)


def test_what_the_store_is_told() -> None:
    m = sanitized()
    w = watching(m)
    s = m.open([1, 2, 3])
    slots = m.reserve([s], [3]).slots
    assert w.take_to_poison().tolist() == [1, 2]  # given out: nothing may be read before a write
    w.check_writes([s], [3], slots)
    m.commit([s], [[1, 2, 3]])
    blocks, generations, extents = w.take_to_seal()
    assert (blocks.tolist(), generations.tolist(), extents.tolist()) == ([1], [1], [2])
    m.truncate(s, 2)
    assert w.take_to_poison().tolist() == [2]  # freed after it was written to
    assert w.take_to_poison().tolist() == [] and not len(w.take_to_seal()[0])
    m.close(s)
    again = m.open([1, 2, 3])
    assert w.take_to_verify()[0].tolist() == [1] and not len(w.take_to_verify()[0])
    m.close(again)


@pytest.mark.parametrize(
    ("name", "args", "what"),
    [
        ("check_copies", ([],), "copies"),
        ("check_writes", ([], [], [[1]]), "slots"),
        ("check_reads", ([], 1, np.zeros((0, 0), np.int32)), "lengths"),
        ("check_reads", ([], [], [1]), "tables"),
        ("check_reads", ([], [], [[1.0]]), "tables"),
        ("check_blocks", ([0.5],), "blocks"),
    ],
)
def test_arrays_of_another_form_are_named(name: str, args: tuple[object, ...], what: str) -> None:
    with pytest.raises(ValueError, match=f"^{what} must be"):
        getattr(watching(sanitized()), name)(*args)
