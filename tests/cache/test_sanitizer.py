"""Faults inside the manager, planted one by one: the sanitizer says which, where and whose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cache_helpers import close_all, grow, remember, write
from sanitizer_helpers import caught, sanitized

from pagedkv.cache import BlockManager, SeqId
from pagedkv.cache.errors import Misuse, SanitizerError
from pagedkv.cache.pool import Pool
from pagedkv.cache.sanitizer import asked_for_by_environment
from pagedkv.errors import ConfigError

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.plants_faults


def allocating(m: BlockManager, tokens: list[int], **name: Any) -> SeqId:
    return write(m, tokens, **name)


def releasing(m: BlockManager, *seqs: int) -> None:
    close_all(m, *seqs)


def skip(patch: Patch, where: str, result: Any = None) -> None:
    """The function does nothing any more."""
    patch.setattr(where, lambda *_, **__: result)


# ---- reference counts


def test_a_count_that_was_changed_behind_its_back() -> None:
    m = sanitized()
    s = allocating(m, [1, 2, 3])
    m.pool.counts[2] += 1
    with caught(Misuse.COUNT, block=2, step=5) as found:
        m.fork(s)
    assert found.functions("allocated")[0] == "allocating"
    assert "block 2 is counted 3 times, 2 are right" in str(found.error)


def test_a_fork_that_counts_no_holder(monkeypatch: Patch) -> None:
    m = sanitized()
    s = allocating(m, [1, 2, 3])
    skip(monkeypatch, "pagedkv.cache.pool.Pool.change")
    with caught(Misuse.COUNT, block=1, step=5):
        m.fork(s)


def test_double_free(monkeypatch: Patch) -> None:
    """A release that runs twice takes away what nobody has."""
    m = sanitized()
    s = allocating(m, [1])
    other = allocating(m, [7])
    change = Pool.change

    def twice(pool: Pool, blocks: np.ndarray, delta: int, allocated: bool = False) -> None:
        for _ in range(2 if delta < 0 else 1):
            change(pool, blocks, delta, allocated)

    monkeypatch.setattr(Pool, "change", twice)
    with caught(Misuse.DOUBLE_FREE, block=1, step=5) as found:
        releasing(m, s)
    assert "block 1 is counted -1 times, 0 are right" in str(found.error)
    assert found.functions("allocated")[0] == "allocating"
    assert found.functions("last released")[0] == "releasing"
    assert m.length(other) == 1


def test_a_close_that_keeps_a_block_is_a_leak_at_once(monkeypatch: Patch) -> None:
    m = sanitized()
    kept, s = allocating(m, [1]), allocating(m, [7, 8, 9])
    skip(monkeypatch, "pagedkv.cache.pool.Pool.change")
    with caught(Misuse.LEAK, block=2, step=5) as found:
        releasing(m, s)
    assert found.functions("last released")[0] == "releasing"
    assert m.length(kept) == 1


def test_a_block_still_counted_when_the_last_sequence_closes_is_a_leak() -> None:
    m = sanitized(num_blocks=64)  # too large for a check of everything after each call
    s = allocating(m, [1, 2, 3])
    m.pool.counts[40] = 1
    with caught(Misuse.LEAK, block=40, step=5):
        releasing(m, s)


def test_a_sequence_that_is_open_when_nothing_is_to_do_is_a_leak() -> None:
    m = sanitized()
    s = allocating(m, [1, 2, 3])
    assert m.sanitizer is not None
    with caught(Misuse.LEAK, seq=s, step=5) as found:
        m.sanitizer.check_idle()
    assert found.functions("opened")[0] == "allocating"
    releasing(m, s)
    m.sanitizer.check_idle()


def test_a_lease_that_is_not_counted(monkeypatch: Patch) -> None:
    m = sanitized()
    allocating(m, [1, 2, 3])
    skip(monkeypatch, "pagedkv.cache.pool.Pool.lease")
    with caught(Misuse.COUNT, block=2, step=5):
        m.lease([2])


# ---- blocks given out


def test_a_held_block_that_is_given_out(monkeypatch: Patch) -> None:
    m = sanitized()
    first = allocating(m, [1, 2, 3])
    second = m.open([7, 8, 9])
    m.pool._free[m.pool.num_free - 1] = 2  # on top of the stack, and held
    with caught(Misuse.HELD_REUSE, block=2, seq=second, step=5) as found:
        m.reserve([second], [1])
    assert f"held by sequences [{first}, {second}]" in str(found.error)


def test_a_copy_source_that_is_given_out_while_the_copy_is_pending() -> None:
    m = sanitized()
    s = allocating(m, [1, 2, 3])
    (child,) = m.fork(s)
    reservation = m.reserve([child], [1])
    source = int(reservation.copies[0, 0])
    m.close(s)  # only the copy needs the block now
    other = m.open([7])
    m.pool._free[m.pool.num_free - 1] = source
    with caught(Misuse.PENDING_REUSE, block=source, seq=other, step=5):
        m.reserve([other], [1])


def test_a_leased_block_that_is_given_out() -> None:
    """A transfer reads it still, nobody holds it."""
    m = sanitized()
    s = allocating(m, [1])
    m.lease([1])
    releasing(m, s)
    other = m.open([7])
    m.pool._free[m.pool.num_free - 1] = 1
    with caught(Misuse.PENDING_REUSE, block=1, step=5) as found:
        m.reserve([other], [1])
    assert "1 leases open" in str(found.error)


@pytest.mark.parametrize("leased", [False, True])
def test_a_block_in_use_that_is_evicted(leased: bool, monkeypatch: Patch) -> None:
    m = sanitized()
    s = allocating(m, [1, 2])
    if leased:
        m.lease([1])
        m.close(s)
    monkeypatch.setattr(Pool, "take_oldest", lambda *_: np.array([1], np.int32))
    with caught(Misuse.PENDING_REUSE if leased else Misuse.HELD_REUSE, block=1, step=5):
        m.evict(1)


def test_a_block_given_out_with_its_name() -> None:
    m = sanitized(step=None)
    remember(m, [1, 2])
    s = m.open([7])
    m.pool._free[m.pool.num_free - 1] = 1
    m.pool.eviction.discard(np.array([1], np.int32))
    with caught(Misuse.BROKEN_INVARIANT, block=1):
        m.reserve([s], [1])


# ---- writing


def test_a_tail_that_a_fork_still_reads_is_not_written_in_place(monkeypatch: Patch) -> None:
    m = sanitized()
    s = allocating(m, [1, 2, 3])
    m.fork(s)
    counts = m.pool.counts.copy()
    m.pool.counts[2] = 1  # what the write rule looks at
    monkeypatch.setattr("pagedkv.cache.manager.apply", _restoring(m, counts))
    with caught(Misuse.SHARED_WRITE, block=2, seq=s, step=5) as found:
        m.reserve([s], [1])
    assert "2 holders" in str(found.error)


def _restoring(m: BlockManager, counts: np.ndarray) -> Callable[..., Any]:
    from pagedkv.cache.reserve import apply

    def run(*args: Any) -> Any:
        m.pool.counts[:] = counts
        return apply(*args)

    return run


def test_a_leased_tail_is_not_written_in_place() -> None:
    m = sanitized()
    s = allocating(m, [1, 2, 3])
    m.lease([2])
    m.pool.leases[2] = 0
    with caught(Misuse.SHARED_WRITE, block=2, seq=s, step=5):
        m.reserve([s], [1])


def test_a_published_tail_is_not_written_in_place(monkeypatch: Patch) -> None:
    m = sanitized()
    remember(m, [1, 2, 3])
    s = m.open([1, 2, 3, 4])
    skip(monkeypatch, "pagedkv.cache.manager.withdraw")
    with caught(Misuse.SHARED_WRITE, block=2, seq=s, step=5) as found:
        m.reserve([s], [1])
    assert "1 published slots" in str(found.error)


# ---- tables


def _wrong(result: Any, field: str) -> Any:
    arrays = {"copies": (result.copies + 1,), "slots": result.group_slots + 1}
    return result._replace(**{f"group_{field}": arrays[field]})


@pytest.mark.parametrize("field", ["copies", "slots"])
def test_a_reservation_that_says_something_else_than_the_table(
    field: str, monkeypatch: Patch
) -> None:
    m = sanitized()
    s = allocating(m, [1, 2, 3])
    m.fork(s)
    from pagedkv.cache.reserve import apply

    monkeypatch.setattr("pagedkv.cache.manager.apply", lambda *a: _wrong(apply(*a), field))
    with caught(Misuse.WRONG_TABLE, seq=s, step=5):
        m.reserve([s], [1])


def test_a_fork_with_another_table(monkeypatch: Patch) -> None:
    m = sanitized()
    s = allocating(m, [1, 2, 3])
    (child,) = m.fork(s)
    monkeypatch.setattr(m.table, "write", lambda *_: None)
    with pytest.raises(SanitizerError) as info:
        m.fork(s)
    assert info.value.kind == Misuse.WRONG_TABLE
    assert child != info.value.seq != s


def test_a_row_that_gets_no_block_for_its_tokens(monkeypatch: Patch) -> None:
    m = sanitized(num_blocks=64)
    s = m.open([1])
    monkeypatch.setattr(m.table, "write", lambda *_: None)
    with caught(Misuse.WRONG_TABLE, seq=s, step=5):
        m.reserve([s], [1])


def test_a_commit_that_keeps_the_surplus(monkeypatch: Patch) -> None:
    m = sanitized(num_blocks=64)
    s = m.open([1])
    m.reserve([s], [4])
    skip(monkeypatch, "pagedkv.cache.manager.drop_entries")
    with caught(Misuse.WRONG_TABLE, seq=s, step=5):
        m.commit([s], [[1]])


def test_a_cancel_that_leaves_the_copy_in_the_table(monkeypatch: Patch) -> None:
    m = sanitized()
    s = allocating(m, [1, 2, 3])
    m.fork(s)
    m.reserve([s], [1])
    skip(monkeypatch, "pagedkv.cache.manager.cancel")
    with caught(Misuse.WRONG_TABLE, seq=s, step=5):
        m.cancel([s])


def test_a_closed_sequence_that_is_not_refused(monkeypatch: Patch) -> None:
    m = sanitized()
    s = allocating(m, [1, 2, 3])
    releasing(m, s)
    again = m.open([7])
    row = np.array([s % m.max_seqs])
    monkeypatch.setattr(m.table, "find", lambda _: row)
    with caught(Misuse.FREED_READ, seq=s, step=5) as found:
        m.reserve([s], [1])
    assert found.functions("closed")[0] == "releasing"
    assert again % m.max_seqs == s % m.max_seqs


# ---- hits


def _hit(monkeypatch: Patch, blocks: list[int], found: int) -> None:
    """Whatever is looked up, these blocks are the answer."""
    from pagedkv.cache.lookup import Hits

    skip(monkeypatch, "pagedkv.cache.lookup.look_up", Hits(blocks, 0, found))


def test_a_hit_on_other_tokens(monkeypatch: Patch) -> None:
    m = sanitized()
    releasing(m, allocating(m, [1, 2, 3]))
    _hit(monkeypatch, [1], 2)
    with pytest.raises(SanitizerError) as info:
        m.open([1, 7, 3])
    assert (info.value.kind, info.value.block) == (Misuse.WRONG_HIT, 1)
    assert "does not hold the tokens of the prompt" in str(info.value)
    assert "in allocating" in str(info.value) and "in releasing" in str(info.value)


def test_a_hit_past_what_is_filled(monkeypatch: Patch) -> None:
    m = sanitized()
    releasing(m, allocating(m, [1, 2, 3]))
    _hit(monkeypatch, [1, 2], 4)
    with pytest.raises(SanitizerError, match="block 2 does not hold the tokens") as info:
        m.open([1, 2, 3, 0, 5])
    assert info.value.kind == Misuse.WRONG_HIT


def test_a_hit_that_leaves_nothing_to_compute(monkeypatch: Patch) -> None:
    m = sanitized()
    remember(m, [1, 2])
    _hit(monkeypatch, [1], 2)
    with pytest.raises(SanitizerError, match="2 of 2 tokens were found") as info:
        m.open([1, 2])
    assert info.value.kind == Misuse.WRONG_HIT


def test_a_hit_on_a_block_without_a_name(monkeypatch: Patch) -> None:
    m = sanitized()
    remember(m, [1, 2, 3])
    m.reset_cache()
    remember(m, [9, 9])
    write(m, [8])
    _hit(monkeypatch, [2], 0)
    with pytest.raises(SanitizerError) as info:
        m.open([1, 2, 3])
    assert info.value.kind in (Misuse.WRONG_HIT, Misuse.BROKEN_INVARIANT)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"namespace": "a"}, {"namespace": "b"}),
        ({"namespace": "a"}, {"namespace": b"a"}),
        ({"namespace": "a"}, {}),
        ({"extra": b"x"}, {"extra": b"y"}),
        ({"namespace": "a", "public": 2}, {"namespace": "a"}),
    ],
)
def test_a_hit_on_what_belongs_to_another_name(
    mine: dict[str, Any], theirs: dict[str, Any], monkeypatch: Patch
) -> None:
    m = sanitized()
    remember(m, [1, 2, 3], **mine)
    _hit(monkeypatch, [1], 2)
    with pytest.raises(SanitizerError, match="computed for another namespace") as info:
        m.open([1, 2, 3], **theirs)
    assert (info.value.kind, info.value.block) == (Misuse.WRONG_HIT, 1)


def test_a_hit_on_what_is_no_longer_public() -> None:
    m = sanitized()
    s = allocating(m, [1, 2, 3], namespace="a", public=2)
    m.truncate(s, 0)
    m.reset_cache()
    m.table.public[s % m.max_seqs] = 2  # as if truncate had left it
    grow(m, s, [1, 2])
    with pytest.raises(SanitizerError, match="computed for another namespace") as info:
        m.open([1, 2, 3], namespace="b", public=2)
    assert (info.value.kind, info.value.block) == (Misuse.WRONG_HIT, 1)


def test_the_public_part_is_of_everybody() -> None:
    m = sanitized()
    remember(m, [1, 2, 3], namespace="a", public=2)
    assert m.cached_tokens(m.open([1, 2, 3], namespace="b", public=2)) == 2


def test_a_hit_on_what_was_computed_before_a_reset(monkeypatch: Patch) -> None:
    """Held through the reset, and published after it."""
    m = sanitized()
    s = allocating(m, [1])
    m.reset_cache()
    grow(m, s, [2])
    m.table.outdated[:] = False
    grow(m, s, [3, 4])
    frame = m.table.frames[s % m.max_seqs].private
    monkeypatch.setattr(m.sanitizer, "_check_every", 10**9)
    from pagedkv.cache.index import ROOT, token_bytes

    m.index.publish(1, ROOT, frame, token_bytes(m.contents[1]))
    m.pool.name(np.array([1], np.int32), 2)
    with pytest.raises(SanitizerError, match="before the cache was reset") as info:
        m.open([1, 2, 3])
    assert (info.value.kind, info.value.block) == (Misuse.WRONG_HIT, 1)


def test_a_name_that_a_reset_leaves(monkeypatch: Patch) -> None:
    m = sanitized()
    remember(m, [1, 2])
    skip(monkeypatch, "pagedkv.cache.manager.withdraw_all")
    with caught(Misuse.WRONG_HIT, block=1, step=5):
        m.reset_cache()


def test_a_block_published_before_it_is_full() -> None:
    m = sanitized()
    s = allocating(m, [1])
    m.contents[1] = 1, 9
    with pytest.raises(SanitizerError) as info:
        _publish_early(m, s)
    assert (info.value.kind, info.value.block) == (Misuse.WRONG_HIT, 1)
    assert "published with 2 slots, 1 are filled" in str(info.value)


def _publish_early(m: BlockManager, s: SeqId) -> None:
    m.reserve([s], [1])
    m.pool.extents[1] = 2
    m.commit([s], [[]])


def test_a_block_published_under_other_tokens(monkeypatch: Patch) -> None:
    m = sanitized()
    s = m.open([1, 2])
    m.reserve([s], [2])
    flatten = "pagedkv.cache.manager.flatten_tokens"
    monkeypatch.setattr(flatten, lambda *_: (np.array([1, 7], np.int32), np.array([2])))
    with caught(Misuse.WRONG_HIT, block=1, step=5):
        m.commit([s], [[1, 2]])


def test_an_entry_that_moves_to_a_block_with_another_content(monkeypatch: Patch) -> None:
    m = sanitized()
    other = allocating(m, [7, 8])
    s = m.open([1, 2])
    m.reserve([s], [2])
    monkeypatch.setattr(m.index, "publish", lambda *_: 1)
    with caught(Misuse.WRONG_HIT, block=1, seq=s, step=5):
        m.commit([s], [[1, 2]])
    assert m.length(other) == 2


# ---- everything else


def test_a_verb_that_ends_with_an_error_of_its_own(monkeypatch: Patch) -> None:
    m = sanitized()

    def fall_over(*_: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr("pagedkv.cache.manager.match", fall_over)
    monkeypatch.setattr("pagedkv.cache.manager.open_row", fall_over)
    with caught(Misuse.BROKEN_INVARIANT, step=5) as found:
        allocating(m, [1])
    assert "open ended with IndexError" in str(found.error)
    assert found.functions("found in step 5, by open,")[0] == "allocating"


def test_a_refusal_that_has_changed_something(monkeypatch: Patch) -> None:
    m = sanitized()
    s = allocating(m, [1])

    def change_and_refuse(*_: object) -> None:
        m.table.lengths[s % m.max_seqs] = 2
        raise ValueError("no")

    monkeypatch.setattr("pagedkv.cache.manager.read_counts", change_and_refuse)
    with caught(Misuse.BROKEN_INVARIANT, step=5):
        m.reserve([s], [1])


@pytest.mark.parametrize(
    ("name", "array"), [("lengths", "lengths"), ("pending copies", "copy_sources")]
)
def test_an_array_changed_between_calls(name: str, array: str) -> None:
    m = sanitized()
    s = allocating(m, [1, 2, 3])
    getattr(m.table, array)[s % m.max_seqs] += 1
    with pytest.raises(SanitizerError) as info:
        m.open([9])
    assert info.value.kind == Misuse.BROKEN_INVARIANT


def test_a_snapshot_with_counts_that_are_wrong_is_not_taken_over(monkeypatch: Patch) -> None:
    monkeypatch.delenv("PAGEDKV_SANITIZE", raising=False)
    m = BlockManager(4, 2)
    write(m, [1, 2, 3])
    m.pool.counts[1] += 1
    data = m.snapshot()
    BlockManager.restore(data, sanitize=False)
    with pytest.raises(SanitizerError, match="count 2, but 1 holders"):
        BlockManager.restore(data, sanitize=True)


def test_an_iterator_is_read_once() -> None:
    """As without the sanitizer, which looks at the arguments too."""
    m = sanitized()
    s = m.open(iter([1, 2, 3]))
    m.reserve(iter([s]), counts=iter([3]))
    m.commit({s: None}.keys(), [[1, 2, 3]])
    assert m.length(s) == 3
    m.close(s)


def test_refusals_stay_what_they_are() -> None:
    m = sanitized()
    with pytest.raises(ValueError, match="an int32"):
        m.open([2**40])
    with pytest.raises(KeyError, match="not open"):
        m.close(SeqId(999))
    with pytest.raises(TypeError):
        m.open(nothing=1)


def test_the_environment_turns_it_on(monkeypatch: Patch) -> None:
    monkeypatch.setenv("PAGEDKV_SANITIZE", "1")
    assert BlockManager(4, 2).sanitizer is not None
    monkeypatch.setenv("PAGEDKV_SANITIZE", "0")
    assert BlockManager(4, 2).sanitizer is None and not asked_for_by_environment()
    monkeypatch.setenv("PAGEDKV_SANITIZE", "yes")
    with pytest.raises(ConfigError, match="PAGEDKV_SANITIZE='yes': use 1 or 0"):
        BlockManager(4, 2)


def test_use_after_close_says_who_closed() -> None:
    m = BlockManager(4, 2, sanitize=True)
    seq, other = write(m, [1, 2, 3]), m.open([5])
    m.close(seq)
    for call in (
        lambda: m.close(seq),
        lambda: m.reserve([other, seq], [1, 1]),
        lambda: m.fork(seq),
        lambda: m.truncate(seq, 0),
    ):
        with pytest.raises(KeyError, match=f"sequence {seq} is not open") as caught:
            call()
        (note,) = caught.value.__notes__
        assert note.startswith(f"closed, sequence {seq}, by close, called from")
        assert "test_use_after_close_says_who_closed" in note
    with pytest.raises(KeyError) as caught:
        m.close(999)  # never was one
    assert not hasattr(caught.value, "__notes__")
    m.close(other)
