"""Host and disk hold what they were given, within their bounds, and never anything else."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.cache.index import make_frames
from pagedkv.errors import ConfigError
from pagedkv.tiers.disk import DiskTier
from pagedkv.tiers.host import HostTier
from pagedkv.tiers.interface import Tier
from pagedkv.tiers.names import BlockName, Namer

BYTES = 64


def name(i: int) -> BlockName:
    return BlockName(i.to_bytes(16))


def payload(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, BYTES, dtype=np.uint8)


def tokens(i: int) -> bytes:
    return f"tokens {i}".encode()


def has(tier: Tier, i: int) -> bool:
    """Whether block i is there; if so its payload must be right."""
    out = np.zeros(BYTES, np.uint8)
    found = tier.get(name(i), tokens(i), out)
    assert not found or np.array_equal(out, payload(i))
    return found


def disk(folder: Path, blocks: int = 4, **options: bool) -> DiskTier:
    return DiskTier(folder, blocks * BYTES, BYTES, b"model", **options)


@pytest.fixture(params=["host", "disk", "durable disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    if request.param == "host":
        return HostTier(4 * BYTES, BYTES)
    return disk(tmp_path / "tier", durable=request.param == "durable disk")


def test_the_least_recently_used_goes_first(tier: Tier) -> None:
    for i in range(4):
        assert tier.put(name(i), tokens(i), payload(i))
    assert has(tier, 0)
    assert tier.put(name(2), tokens(2), payload(2))  # there already: only used again
    assert tier.put(name(4), tokens(4), payload(4))
    assert tier.contains([name(i) for i in range(5)]) == [True, False, True, True, True]
    assert tier.num_blocks() == 4
    assert tier.put(name(5), tokens(5), payload(5))
    assert [has(tier, i) for i in range(6)] == [True, False, True, False, True, True]
    assert (tier.stats.stored, tier.stats.evicted) == (6, 2)
    assert (tier.stats.hits, tier.stats.misses) == (5, 2)
    tier.close()
    tier.close()


def test_a_closed_tier_stores_and_finds_nothing(tier: Tier) -> None:
    assert tier.put(name(1), tokens(1), payload(1))
    tier.close()
    assert not tier.put(name(2), tokens(2), payload(2))
    assert not has(tier, 1)
    assert tier.contains([name(1), name(2)]) == [False, False]
    assert (tier.num_blocks(), tier.stats.refused, tier.stats.misses) == (0, 1, 1)


def test_other_tokens_under_a_name_are_a_miss(tier: Tier) -> None:
    tier.put(name(1), tokens(1), payload(1))
    assert not tier.get(name(1), b"others", np.zeros(BYTES, np.uint8))
    assert has(tier, 1)
    tier.close()


def test_a_payload_of_another_size_is_refused(tier: Tier) -> None:
    tier.put(name(1), tokens(1), payload(1))
    for wrong in (
        np.zeros(BYTES + 1, np.uint8),
        np.zeros(BYTES, np.int8),
        np.zeros((1, BYTES), np.uint8),
    ):
        with pytest.raises(ValueError, match=r"a payload is uint8 \[64\]"):
            tier.put(name(2), tokens(2), wrong)
        with pytest.raises(ValueError, match=r"a payload is uint8 \[64\]"):
            tier.get(name(1), tokens(1), wrong)
    assert has(tier, 1)
    assert tier.num_blocks() == 1
    tier.close()


CALLS = st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=40)


@given(CALLS)
def test_the_host_tier_equals_a_plain_lru(calls: list[tuple[bool, int]]) -> None:
    _compare(HostTier(3 * BYTES + BYTES // 2, BYTES), calls)


@given(CALLS)
def test_the_disk_tier_equals_a_plain_lru(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[bool, int]]
) -> None:
    _compare(disk(tmp_path_factory.mktemp("tier"), 3), calls)


def _compare(tier: Tier, calls: list[tuple[bool, int]]) -> None:
    plain: OrderedDict[int, None] = OrderedDict()
    for put, i in calls:
        if put:
            assert tier.put(name(i), tokens(i), payload(i))
            if i not in plain and len(plain) == 3:
                plain.popitem(last=False)
            plain[i] = None
        else:
            assert has(tier, i) == (i in plain)
        if i in plain:
            plain.move_to_end(i)
        assert tier.contains([name(k) for k in range(8)]) == [k in plain for k in range(8)]
        assert tier.num_blocks() == len(plain)
    tier.close()


@pytest.mark.parametrize("make", [HostTier, lambda c, b: DiskTier("unused", c, b, b"m")])
@pytest.mark.parametrize(("capacity", "block"), [(BYTES - 1, BYTES), (0, BYTES), (5, 0)])
def test_a_tier_without_room_for_a_block_is_refused(
    make: object, capacity: int, block: int
) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match="holds no block"):
        make(capacity, block)


def test_the_disk_survives_a_restart_with_the_order_of_use(tmp_path: Path) -> None:
    first = disk(tmp_path)
    for i in range(4):
        first.put(name(i), tokens(i), payload(i))
    assert has(first, 0)
    first.close()
    again = disk(tmp_path)
    again.put(name(9), tokens(9), payload(9))
    assert [has(again, i) for i in (0, 1, 2, 3, 9)] == [True, False, True, True, True]
    again.close()


def test_a_smaller_and_a_larger_capacity(tmp_path: Path) -> None:
    disk_of_four = disk(tmp_path)
    for i in range(4):
        disk_of_four.put(name(i), tokens(i), payload(i))
    disk_of_four.close()
    small = disk(tmp_path, 2)
    assert small.num_blocks() == 2
    small.close()
    large = disk(tmp_path, 6)
    for i in range(10, 14):
        large.put(name(i), tokens(i), payload(i))
    assert large.num_blocks() == 6
    assert all(has(large, i) for i in range(10, 14))
    large.close()


def test_two_open_tiers_see_each_other(tmp_path: Path) -> None:
    one, two = disk(tmp_path), disk(tmp_path)
    for i in range(6):
        (one, two)[i % 2].put(name(i), tokens(i), payload(i))
    assert [has(one, i) for i in range(6)] == [has(two, i) for i in range(6)]
    assert one.num_blocks() == two.num_blocks() == 4
    one.close()
    two.close()


def test_a_torn_slot_is_dropped_and_counted(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    for i in range(2):
        tier.put(name(i), tokens(i), payload(i))
    with (tmp_path / "blocks.bin").open("r+b") as file:
        file.seek(BYTES // 2)
        file.write(b"torn")
    assert [has(tier, i) for i in range(2)] == [False, True]
    assert tier.stats.damaged == 1
    assert tier.num_blocks() == 1
    with (tmp_path / "blocks.bin").open("r+b") as file:
        file.truncate(BYTES + 3)
    assert not has(tier, 1)
    assert tier.put(name(0), tokens(0), payload(0))
    assert has(tier, 0)
    tier.close()


def test_the_slot_of_another_block_is_not_trusted(tmp_path: Path) -> None:
    """As after a kill between writing a slot and writing its row."""
    tier = disk(tmp_path, 1)
    tier.put(name(1), tokens(1), payload(1))
    (tmp_path / "blocks.bin").write_bytes(payload(2).tobytes())
    assert not has(tier, 1)
    assert tier.stats.damaged == 1
    tier.close()


@pytest.mark.parametrize("wrong", ["garbage", "a file", "other model", "other size"])
def test_a_folder_that_cannot_be_used_turns_the_tier_off(
    tmp_path: Path, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "tier"
    if wrong == "garbage":
        folder.mkdir()
        (folder / "index.db").write_bytes(b"no database" * 1000)
    elif wrong == "a file":
        folder.write_text("")
    else:
        other = DiskTier(folder, 4096, BYTES if wrong == "other model" else 32, b"another")
        other.put(name(1), tokens(1), payload(1)[: other.block_bytes])
        other.close()
    with caplog.at_level(logging.WARNING, "pagedkv"):
        tier = disk(folder)
    assert tier.off is not None
    assert "is off" in caplog.text
    assert not tier.put(name(1), tokens(1), payload(1))
    assert not has(tier, 1)
    assert tier.contains([name(1)]) == [False]
    assert (tier.num_blocks(), tier.stats.refused, tier.stats.misses) == (0, 1, 1)
    tier.close()
    if wrong == "other model":  # whose it is loses nothing
        owner = DiskTier(folder, 4096, BYTES, b"another")
        assert has(owner, 1)
        owner.close()


def test_a_full_disk_turns_the_tier_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk(tmp_path)
    assert tier.put(name(1), tokens(1), payload(1))

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert not tier.put(name(2), tokens(2), payload(2))
    assert tier.off is not None
    assert "No space left" in tier.off
    tier.close()
    again = disk(tmp_path)
    assert [has(again, i) for i in (1, 2)] == [True, False]
    again.close()


def test_an_index_that_breaks_later_turns_the_tier_off(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    tier.put(name(1), tokens(1), payload(1))
    with sqlite3.connect(tmp_path / "index.db") as other:
        other.execute("DROP TABLE slots")
    assert not has(tier, 1)
    assert tier.off is not None
    tier.close()


# ---- names ------------------------------------------------------------------------------------

PROMPT = np.arange(10, dtype=np.int32)


@pytest.mark.parametrize("damage", ["used = 9223372036854775807", "used = 'x'", "checksum = NULL"])
def test_an_index_with_values_of_any_kind_is_no_error(tmp_path: Path, damage: str) -> None:
    tier = disk(tmp_path / "d")
    for i in range(4):
        tier.put(name(i), tokens(i), payload(i))
    index = sqlite3.connect(tmp_path / "d" / "index.db")
    index.execute(f"UPDATE slots SET {damage}")
    index.commit()
    for i in range(8):
        has(tier, i)
        tier.put(name(i), tokens(i), payload(i))
        has(tier, i)
    tier.close()
    index.close()


def test_an_index_that_was_emptied_is_filled_again(tmp_path: Path) -> None:
    tier = disk(tmp_path / "d")
    tier.put(name(1), tokens(1), payload(1))
    index = sqlite3.connect(tmp_path / "d" / "index.db")
    index.execute("DELETE FROM slots")
    index.commit()
    index.close()
    assert not has(tier, 1)
    assert tier.put(name(2), tokens(2), payload(2))
    assert has(tier, 2)
    tier.close()


def test_a_large_disk_tier_takes_no_room_before_it_is_used(tmp_path: Path) -> None:
    tier = disk(tmp_path / "d", blocks=2**40)
    assert tier.put(name(1), tokens(1), payload(1))
    assert has(tier, 1)
    tier.close()


def test_host_memory_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(ConfigError, match="give less"):
        HostTier(2**70, BYTES)


def test_names_say_all_that_kv_depends_on() -> None:
    def names(fingerprint: bytes = b"m", space: str | None = None, public: int = 0) -> list[bytes]:
        return list(Namer(fingerprint).chain(PROMPT, make_frames(space, None), public, 4))

    plain = names()
    assert [len(n) for n in plain] == [16, 16, 16]
    assert plain == names()
    for other in (names(b"n"), names(space="a"), names(space="b"), names(public=1)):
        assert not set(other) & set(plain)
    # The public part of two tenants is one; behind it each has names of its own.
    a, b = names(space="a", public=2), names(space="b", public=2)
    assert a[:2] == b[:2]
    assert a[2] != b[2]


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_names_are_equal_exactly_for_equal_prefixes(one: list[int], two: list[int]) -> None:
    namer, frames = Namer(b"m"), make_frames("t", b"x")
    chains = [namer.chain(np.array(p, np.int32), frames, 0, 2) for p in (one, two)]
    for i, (x, y) in enumerate(zip(*chains, strict=False)):
        assert (x == y) == (one[: 2 * i + 2] == two[: 2 * i + 2])


# ---- one above the other


def over(folder: Path, write_through: bool = False) -> HostTier:
    return HostTier(2 * BYTES, BYTES, disk(folder, 8), write_through)


def test_what_the_host_evicts_goes_below_and_comes_up_again(tmp_path: Path) -> None:
    tier = over(tmp_path)
    for i in range(4):
        assert tier.put(name(i), tokens(i), payload(i))
    assert tier.num_blocks() == 2
    assert tier.contains([name(i) for i in range(5)]) == [True] * 4 + [False]
    assert all(has(tier, i) for i in range(4))
    assert not has(tier, 4)
    assert tier.num_blocks() == 2
    below = disk(tmp_path, 8)
    assert below.num_blocks() == 4  # to make room for 0 and 1, 2 and 3 went below too


def test_closing_sends_the_rest_below(tmp_path: Path) -> None:
    tier = over(tmp_path)
    tier.put(name(0), tokens(0), payload(0))
    assert disk(tmp_path, 8).num_blocks() == 0
    tier.close()
    tier.close()
    assert has(disk(tmp_path, 8), 0)
    assert not has(tier, 0) and not tier.put(name(1), tokens(1), payload(1))


def test_write_through_is_below_at_once_or_not_at_all(tmp_path: Path) -> None:
    tier = over(tmp_path, write_through=True)
    assert tier.put(name(0), tokens(0), payload(0))
    assert has(disk(tmp_path, 8), 0)
    refused = over(tmp_path / "other", write_through=True)
    assert refused._below is not None
    refused._below.close()
    assert not refused.put(name(0), tokens(0), payload(0))
    assert refused.stats.refused == 1 and not has(refused, 0)


def test_a_name_below_with_other_tokens_is_a_miss(tmp_path: Path) -> None:
    tier = over(tmp_path)
    for i in range(3):
        tier.put(name(i), tokens(i), payload(i))
    out = np.zeros(BYTES, np.uint8)
    for i in (0, 2):  # below, and in host memory
        assert not tier.get(name(i), tokens(1), out)
        assert has(tier, i)


def test_a_folder_that_another_process_is_opening_is_waited_for(tmp_path, monkeypatch):
    """SQLite waits for other writers, but not when it switches to the write-ahead log."""
    other = sqlite3.connect(tmp_path / "index.db", isolation_level=None)
    other.execute("CREATE TABLE it_is_there (x)")
    other.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr("pagedkv.tiers.disk.time.sleep", lambda _: other.execute("ROLLBACK"))
    tier = DiskTier(tmp_path, 4096, 1024, b"model")
    assert tier.off is None
    tier.close()
    other.close()
