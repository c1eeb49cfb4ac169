"""Cache events on the wire: vLLM's shape, names of the tiers, gaps, tails and tenants."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from pagedkv.cache import BlockManager
from pagedkv.cache.index import make_frames
from pagedkv.cache.types import token_array
from pagedkv.tiers.names import Namer
from pagedkv.transfer.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventStream,
    decode_batch,
)
from pagedkv.transfer.prefix_index import WorkerPrefixes

NAMER = Namer(b"a model")


def remember(m: BlockManager, tokens: list[int], namespace: str | None = None) -> None:
    seq = m.open(tokens, namespace)
    rest = tokens[m.length(seq) :]
    m.reserve([seq], [len(rest)])
    m.commit([seq], [rest])
    m.close(seq)


def names(tokens: list[int], namespace: str | None = None, block: int = 2) -> list[bytes]:
    frames = make_frames(namespace, None)
    return [*NAMER.chain(token_array(tokens), frames, 0, block)]


def started(block: int = 2, **options: Any) -> tuple[BlockManager, EventStream]:
    """A manager and its stream, whose first batch (an empty picture) has been sent."""
    m = BlockManager(16, block)
    stream = EventStream(m.listen(), NAMER, block, **options)
    frames = stream.poll(0.0)
    assert frames is not None
    assert decode_batch(frames.payload).events == [AllBlocksCleared()]
    return m, stream


def told(stream: EventStream) -> list[Any]:
    frames = stream.poll(1.0)
    return [] if frames is None else decode_batch(frames.payload).events


def test_the_bytes_are_those_of_vllm() -> None:
    """Field names and nesting as in a message captured from vLLM 0.26.0 (kthena issue 1535)."""
    m, stream = started(data_parallel_rank=0, topic="kv-events", short_hashes=True)
    remember(m, [1, 2, 3, 4])
    frames = stream.poll(5.5)
    assert frames is not None
    assert frames.topic == b"kv-events"
    assert frames.seq == b"\0\0\0\0\0\0\0\1"
    hashes = [int.from_bytes(name[-8:]) for name in names([1, 2, 3, 4])]
    assert msgspec.msgpack.decode(frames.payload) == [
        5.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": None,
                "token_ids": [1, 2, 3, 4],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        ],
        0,
    ]
    m.evict(1)
    m.reset_cache()
    remember(m, [7, 7])
    frames = stream.poll(6.0)
    assert frames is not None
    events = msgspec.msgpack.decode(frames.payload)[1]
    assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored"]


def test_removed_blocks_are_named_once_in_the_order_of_events() -> None:
    m, stream = started()
    remember(m, [1, 2, 3, 4])
    m.evict(2)
    remember(m, [1, 2])
    first, second = names([1, 2, 3, 4])
    kinds = told(stream)
    assert [type(event) for event in kinds] == [BlockStored, BlockRemoved, BlockStored]
    assert set(kinds[1].block_hashes) == {first, second}
    assert kinds[2].block_hashes == [first]


def test_parent_of_a_chain_that_follows_a_hit_is_the_hit() -> None:
    m, stream = started()
    remember(m, [1, 2, 3, 4])
    told(stream)
    remember(m, [1, 2, 3, 4, 5, 6])
    (event,) = told(stream)
    _, parent, block = names([1, 2, 3, 4, 5, 6])
    assert (event.parent_block_hash, event.block_hashes) == (parent, [block])
    assert event.token_ids == [5, 6]


def test_tails_are_not_told() -> None:
    m, stream = started(block=4)
    remember(m, [1, 2, 3, 4, 5])
    (event,) = told(stream)
    assert event.token_ids == [1, 2, 3, 4]
    seq = m.open([1, 2, 3, 4, 5, 6])
    m.reserve([seq], [1])  # withdraws the tail
    m.close(seq)
    assert told(stream) == []


def test_tenant_salt_equal_prompts_of_two_tenants_have_different_hashes() -> None:
    m, stream = started()
    remember(m, [1, 2], "a")
    remember(m, [1, 2], "b")
    remember(m, [1, 2])
    a, b, public = told(stream)
    assert len({a.block_hashes[0], b.block_hashes[0], public.block_hashes[0]}) == 3
    assert a.extra_keys != b.extra_keys
    assert public.extra_keys is None
    assert a.block_hashes == names([1, 2], "a")


def test_missing_adapter_what_else_makes_kv_differ_is_in_the_hash() -> None:
    m, stream = started()
    for extra in (b"adapter x, version 1", b"adapter x, version 2", None):
        seq = m.open([1, 2], extra=extra)
        m.reserve([seq], [2])
        m.commit([seq], [[1, 2]])
        m.close(seq)
    assert len({event.block_hashes[0] for event in told(stream)}) == 3


def test_framing_a_namespace_and_extra_bytes_do_not_run_together() -> None:
    tokens = token_array([1, 2])
    a, b = make_frames("org_1", b"2345"), make_frames("org_12345", b"")
    assert NAMER.chain(tokens, a, 0, 2) != NAMER.chain(tokens, b, 0, 2)
    assert NAMER.facts(a.private) != NAMER.facts(b.private)


def test_public_blocks_have_one_name_for_all_tenants() -> None:
    m, stream = started()
    for tenant in ("a", "b"):
        seq = m.open([1, 2, 3, 4], tenant, public=2)
        rest = [1, 2, 3, 4][m.length(seq) :]
        m.reserve([seq], [len(rest)])
        m.commit([seq], [rest])
        m.close(seq)
    first, own, other = told(stream)
    assert first.extra_keys is None
    assert own.parent_block_hash == other.parent_block_hash == first.block_hashes[0]
    assert own.block_hashes != other.block_hashes
    frames = make_frames("b", None)
    assert [*NAMER.walk(token_array([1, 2, 3, 4]), frames, 1, 2)] == [
        *first.block_hashes,
        *other.block_hashes,
    ]


def test_fingerprint_workers_of_two_models_have_different_hashes() -> None:
    tokens, frames = token_array([1, 2]), make_frames(None, None)
    assert Namer(b"x").chain(tokens, frames, 0, 2) != Namer(b"y").chain(tokens, frames, 0, 2)


def test_a_stream_begins_with_all_that_was_there_before_it() -> None:
    m = BlockManager(16, 2)
    remember(m, [1, 2, 3, 4])
    stream = EventStream(m.listen(), NAMER, 2)
    cleared, stored = told(stream)
    assert cleared == AllBlocksCleared()
    assert stored.block_hashes == names([1, 2, 3, 4])
    assert stream.poll(2.0) is None


def test_a_picture_comes_when_asked_for_or_when_the_log_has_moved_on() -> None:
    m = BlockManager(256, 2)
    stream = EventStream(m.listen(capacity=4), NAMER, 2)
    told(stream)
    for i in range(30):
        remember(m, [i, i])
    cleared, *stored = told(stream)
    assert cleared == AllBlocksCleared()
    assert len(stored) == 30
    stream.ask_for_picture()
    assert told(stream) == [cleared, *stored]


def test_bytes_that_are_no_batch_are_refused() -> None:
    with pytest.raises(ValueError):
        decode_batch(b"\x93\x01")


@pytest.mark.parametrize("seed", range(3))
def test_mirror_what_an_index_believes_is_what_the_caches_find(seed: int) -> None:
    """Random work on three small caches, whose events come late and all at once."""
    rng = np.random.default_rng(seed)
    caches = [BlockManager(12, 2, max_seqs=4) for _ in range(3)]
    streams = [EventStream(m.listen(), NAMER, 2) for m in caches]
    index, found = WorkerPrefixes(), 0
    for _ in range(150):
        for _ in range(int(rng.integers(1, 6))):
            m = caches[int(rng.integers(3))]
            tokens = rng.integers(0, 2, int(rng.integers(2, 14))).tolist()
            public = int(rng.integers(len(tokens) + 1))
            seq = m.open(tokens, "ab"[rng.integers(2)], public=public)
            rest = tokens[m.length(seq) :]
            m.reserve([seq], [len(rest)])
            m.commit([seq], [rest])
            m.close(seq)
        for i, stream in enumerate(streams):
            if frames := stream.poll(0.0):
                batch = decode_batch(frames.payload)
                assert index.apply(i, int.from_bytes(frames.seq), batch)
        tokens = rng.integers(0, 2, 13).tolist()
        tenant, public = "ab"[rng.integers(2)], int(rng.integers(14))
        frames_of = make_frames(tenant, None)
        walk = NAMER.walk(token_array(tokens), frames_of, public // 2, 2)
        believed = index.cached_blocks(walk, 3).tolist()
        assert believed == [m.match(tokens, tenant, public).cached_tokens // 2 for m in caches]
        found += sum(believed)
    assert found > 100
