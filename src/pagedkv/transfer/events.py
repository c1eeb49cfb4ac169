"""A worker's cache events on the wire, in the shape of vLLM's, so that its routers can read them.

The shape is that of `vllm/distributed/kv_events.py` since vLLM pull request 42892 (June 2026): the
batch is an array (ts, events, data_parallel_rank), an event a map with its kind under "type".
A published message has three frames: topic, number of the batch as 8 bytes big-endian, payload.
Routers of that time read it (Dynamo's `zmq_wire`, llm-d's `kvevents`), those before it do not.

Beside what vLLM's streams promise, ours begins with `AllBlocksCleared`, and so does each answer to
`ask_for_picture`: all blocks follow in the same batch. A reader that has missed a number forgets
the worker and waits for such a batch.

Partly filled tails are not told: a reader of this shape takes every block for a full one, and a
router would gain less than a block by them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pagedkv.cache.errors import EventGap
from pagedkv.cache.events import Cleared, Event, EventLog, Published, Withdrawn
from pagedkv.cache.index import make_frames, tokens_of

if TYPE_CHECKING:
    from pagedkv.tiers.names import BlockName, Namer

# What vLLM says of the pool that attention reads, on any device.
MEDIUM = "GPU"
FULL_ATTENTION = "full_attention"

BlockHash = bytes | int
_PLAIN = make_frames(None, None)


class BlockStored(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """A chain of full blocks has been stored: `token_ids` are those of all its blocks in order.

    parent_block_hash: of the block before the first; None if there is none. lora_id and lora_name
    are None: what an adapter changes is in the hashes. extra_keys: where a namespace or extra bytes
    are part of the names, a keyed digest of them for each block, so that a router that names
    blocks itself keeps tenants apart too.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """Blocks that are found no more."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """Nothing is found any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """`ts`: seconds since the epoch. Events in the order in which they took effect."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


class EventFrames(NamedTuple):
    """A message: what a ZeroMQ socket's `send_multipart` takes. `seq`: 8 bytes, big-endian."""

    topic: bytes
    seq: bytes
    payload: bytes


def decode_batch(payload: bytes) -> KVEventBatch:
    """ValueError for anything but such a payload."""
    try:
        batch: KVEventBatch = _DECODER.decode(payload)
    except RecursionError as error:
        raise ValueError(f"{len(payload)} bytes are no batch of events: {error}") from None
    return batch


_DECODER = msgspec.msgpack.Decoder(KVEventBatch)


class EventStream:
    """What a worker tells of its cache; polled between steps, by the thread that steps.

    log: of the worker's manager (`BlockManager.listen`). namer: makes the hashes; readers compare
        them with those of a namer of the same fingerprint. data_parallel_rank, topic: passed on.
    short_hashes: hashes are the low 64 bits as numbers, which readers need that know of no longer
        ones; else the 16 bytes.
    """

    def __init__(
        self,
        log: EventLog,
        namer: Namer,
        block_size: int,
        *,
        data_parallel_rank: int | None = None,
        topic: str = "",
        short_hashes: bool = False,
    ) -> None:
        self._log, self._namer, self._block_size = log, namer, block_size
        self._rank, self._topic = data_parallel_rank, topic.encode()
        self._short = short_hashes
        self._names: dict[int, BlockName] = {}  # by serial: of full blocks that have a name now
        self._at = 0  # next event of the log
        self._next_seq = 0  # number of the next batch
        self._picture_wanted = True

    def ask_for_picture(self) -> None:
        """Makes the next batch one that says everything."""
        self._picture_wanted = True

    def poll(self, now: float) -> EventFrames | None:
        """What has happened since the last poll; None if nothing has. `now`: seconds, for `ts`."""
        events: list[Event] = []
        if not self._picture_wanted:
            try:
                events = self._log.since(self._at)
            except EventGap:  # as for any reader
                self._picture_wanted = True
        if self._picture_wanted:
            self._at, published = self._log.picture()
            events = [Cleared(), *published]
            self._picture_wanted = False
        else:
            self._at += len(events)
        told = self._translate(events)
        if not told:
            return None
        payload = msgspec.msgpack.encode(KVEventBatch(now, told, self._rank))
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        return EventFrames(self._topic, seq.to_bytes(8), payload)

    def _translate(self, events: list[Event]) -> list[KVEvent]:
        told: list[KVEvent] = []
        chain: list[Published] = []
        gone: list[BlockHash] = []

        def flush() -> None:
            if chain:
                told.append(self._stored(chain))
                chain.clear()
            if gone:
                told.append(BlockRemoved(list(gone), MEDIUM, 0))
                gone.clear()

        for event in events:
            match event:
                case Published():
                    if len(event.tokens) < 4 * self._block_size:
                        continue
                    if gone or (chain and not _follows(event, chain[-1])):
                        flush()
                    chain.append(event)
                case Withdrawn(serial):
                    if chain:
                        flush()
                    name = self._names.pop(serial, None)
                    if name is not None:  # else a tail
                        gone.append(self._hash(name))
                case Cleared():
                    self._names.clear()
                    chain.clear()
                    gone.clear()
                    told = [AllBlocksCleared()]  # whatever came before it
        flush()
        return told

    def _stored(self, chain: list[Published]) -> BlockStored:
        namer, names = self._namer, self._names
        first = chain[0]
        name = parent = names[first.parent] if first.parent else namer.root
        hashes: list[BlockHash] = []
        for block in chain:
            name = names[block.serial] = namer.child_of_bytes(name, block.frame, block.tokens)
            hashes.append(self._hash(name))
        facts: list[tuple[str, ...] | None] | None = None
        if first.frame not in _PLAIN:
            facts = [(namer.facts(first.frame),)] * len(chain)
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=self._hash(parent) if first.parent else None,
            token_ids=tokens_of(b"".join(block.tokens for block in chain)).tolist(),
            block_size=self._block_size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
            extra_keys=facts,
            group_idx=0,
            kv_cache_spec_kind=FULL_ATTENTION,
        )

    def _hash(self, name: BlockName) -> BlockHash:
        return int.from_bytes(name[-8:]) if self._short else name


def _follows(event: Published, last: Published) -> bool:
    return event.parent == last.serial and event.frame == last.frame
