"""K/V between block sizes and dtypes, and K/V that is not as it was sent."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moving_world import hello

from pagedkv.cache.types import Int32, Int64
from pagedkv.transfer.actions import SendData, Write
from pagedkv.transfer.messages import Data, Hello, pack_tokens
from pagedkv.transfer.payload import (
    DTYPES,
    KV,
    UInt8,
    as_blocks,
    convert,
    filled,
    store,
    token_bytes,
)

SHAPE = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 4}


class Store:
    """A K/V store that counts what is written."""

    def __init__(self, ours: Hello) -> None:
        self.ours = ours
        self.blocks = np.zeros((ours.num_blocks + 1, token_bytes(ours) * ours.block_size), np.uint8)
        self.blocks[:] = 0x55
        self.reads = 0

    def read(self, blocks: Int32) -> UInt8:
        self.reads += 1
        return self.blocks[blocks]

    def write(self, blocks: Int32, data: UInt8) -> None:
        self.blocks[blocks] = data

    def at(self, slots: Int64) -> KV:
        """K/V of slots, [n, L, 2, G, D]."""
        size = self.ours.block_size
        view = self.blocks.view(DTYPES[self.ours.dtype]).reshape(-1, 2, 2, size, 3, 4)
        return view[slots // size, :, :, slots % size]

    def put(self, slots: Int64, values: KV) -> None:
        size = self.ours.block_size
        view = self.blocks.view(DTYPES[self.ours.dtype]).reshape(-1, 2, 2, size, 3, 4)
        view[slots // size, :, :, slots % size] = values


def slots_of(table: Sequence[int], size: int, start: int, stop: int) -> Int64:
    places = np.arange(start, stop)
    return (np.array(table)[places // size] * size + places % size).astype(np.int64)


def sent(source: Store, table: Sequence[int], start: int, stop: int) -> Data:
    """What the sender makes of tokens [start, stop) in blocks `table`."""
    size = source.ours.block_size
    blocks = np.array(table[start // size : -(-stop // size)], np.int32)
    tokens = pack_tokens(np.arange(start, stop, dtype=np.int32))
    data = Data("r", 1, 1, 1, start, stop, tokens, source.ours.dtype)
    return filled(SendData("D", data, blocks), source.read(blocks))


def moved(source: Store, target: Store, data: Data, skip: int, table: Sequence[int]) -> int | None:
    start = data.start + skip
    slots = slots_of(table, target.ours.block_size, start, data.stop)
    write = Write("P", data, start, slots)
    return store(write, as_blocks(data, source.ours), target.ours, source.ours, target)


@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    dtypes=st.tuples(st.sampled_from(list(DTYPES)), st.sampled_from(list(DTYPES))),
    first=st.integers(0, 3),
    length=st.integers(1, 11),
    skip=st.integers(0, 10),
    order=st.permutations(range(1, 30)),
)
def test_every_token_arrives_and_no_other_slot_changes(
    sizes: tuple[int, int],
    dtypes: tuple[str, str],
    first: int,
    length: int,
    skip: int,
    order: list[int],
) -> None:
    ours = [hello("w", 30, s, dtype=d, **SHAPE) for s, d in zip(sizes, dtypes, strict=True)]
    source, target = map(Store, ours)
    skip = min(skip, length - 1)
    start = first * sizes[0]
    stop = start + length
    table, other = list(order), list(order[::-1])
    values = np.random.default_rng(length).standard_normal((length, 2, 2, 3, 4), np.float32)
    source.put(slots_of(table, sizes[0], start, stop), convert(values, "float32", dtypes[0]))
    before = target.blocks.copy()
    assert moved(source, target, sent(source, table, start, stop), skip, other) is None
    slots = slots_of(other, sizes[1], start + skip, stop)
    expected = convert(convert(values, "float32", dtypes[0]), dtypes[0], dtypes[1])[skip:]
    assert (target.at(slots) == expected).all()
    changed = target.blocks.copy()
    target.blocks = before.copy()
    target.put(slots, expected)
    assert (target.blocks == changed).all()


def test_whole_blocks_of_one_form_are_written_as_they_came() -> None:
    source, target = (Store(hello("w", 10, 4, **SHAPE)) for _ in range(2))
    source.blocks[:] = np.random.default_rng(0).integers(0, 256, source.blocks.shape)
    assert moved(source, target, sent(source, [3, 1, 2], 0, 12), 4, [9, 7, 8]) is None
    assert target.reads == 0
    assert (target.blocks[[7, 8]] == source.blocks[[1, 2]]).all()
    assert (target.blocks[9] == 0x55).all()


@pytest.mark.parametrize("bad", range(3))
def test_blocks_before_the_first_bad_one_are_kept(bad: int) -> None:
    source, target = (Store(hello("w", 10, 4, **SHAPE)) for _ in range(2))
    source.blocks[:] = np.random.default_rng(0).integers(0, 256, source.blocks.shape)
    data = sent(source, [4, 1, 2, 3], 4, 14)
    payload = bytearray(data.payload)
    payload[bad * len(payload) // 3 + 5] ^= 1
    write = Write("P", data, 4, slots_of([9, 8, 7, 6], 4, 4, 14))
    blocks = as_blocks(data, source.ours, bytes(payload))
    assert store(write, blocks, target.ours, source.ours, target) == 4 + 4 * bad
    assert [(target.blocks[b] == 0x55).all() for b in (8, 7, 6)] == [i >= bad for i in range(3)]


def test_a_payload_of_another_dtype_than_its_senders_is_not_read() -> None:
    source = Store(hello("w", 10, 4, **SHAPE))
    data = sent(source, [1, 2], 0, 8)
    assert as_blocks(data, source.ours) is not None
    assert as_blocks(msgspec.structs.replace(data, dtype="bfloat16"), source.ours) is None


@pytest.mark.parametrize("payload", [b"", b"x" * 100])
def test_a_payload_of_the_wrong_size_is_bad_from_its_first_token(payload: bytes) -> None:
    source, target = (Store(hello("w", 10, 4, **SHAPE)) for _ in range(2))
    data = sent(source, [1, 2], 0, 8)
    write = Write("P", data, 0, slots_of([1, 2], 4, 0, 8))
    blocks = as_blocks(data, source.ours, payload)
    assert blocks is None
    assert store(write, blocks, target.ours, source.ours, target) == 0
    assert (target.blocks == 0x55).all()


def test_conversion_is_torchs_to_the_bit() -> None:
    """Ties, subnormals, the largest numbers, infinities; NaN stays NaN."""
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    edges = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 1], np.uint32)
    values = np.concatenate([bits, edges]).view(np.float32)
    expected = torch.from_numpy(values).bfloat16()
    ours = convert(values, "float32", "bfloat16")
    number = ~np.isnan(values)
    assert (ours[number] == expected.view(torch.uint16).numpy()[number]).all()
    back = convert(ours, "bfloat16", "float32")
    assert (back[number] == expected.float().numpy()[number]).all()
    assert np.isnan(back[~number]).all() and not number.all()
