"""`BlockManager`: sequences over a pool of fixed-size blocks. The verbs of the cache.

Every call is all-or-nothing: it computes and checks first, then changes. An error leaves the state
byte-identical. Positions are half-open; B is the block size, n a sequence's committed length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedkv.cache.check import check_manager
from pagedkv.cache.errors import OutOfBlocks
from pagedkv.cache.events import EventLog
from pagedkv.cache.evict import EVICTION_POLICIES
from pagedkv.cache.export import Tables
from pagedkv.cache.index import PrefixIndex, make_frames
from pagedkv.cache.lease import Lease, start_lease, stop_lease
from pagedkv.cache.lookup import Query, match, open_row, read_query
from pagedkv.cache.pool import Pool
from pagedkv.cache.publish import evict, publish_full, publish_tail, withdraw, withdraw_all
from pagedkv.cache.reserve import (
    apply,
    cancel,
    drop_entries,
    end_copies,
    read_counts,
    refuse_commit,
)
from pagedkv.cache.sanitizer import Sanitizer, asked_for_by_environment, watched
from pagedkv.cache.sequence_data import pack_sequence, unpack_sequence
from pagedkv.cache.snapshot import pack_manager, state_key, unpack_manager
from pagedkv.cache.state import State
from pagedkv.cache.table import NO_RESERVATION, BlockTable, int_array
from pagedkv.cache.types import (
    BlockId,
    Imported,
    Int32,
    Int64,
    Match,
    Reservation,
    SeqId,
    Tokens,
    flatten_tokens,
    whole,
)
from pagedkv.cache.writes import WritePlan, plan_writes


class BlockManager:
    """Block tables, reference counts, the prefix cache and the order of eviction.

    num_blocks: blocks that can hold tokens, ids 1..num_blocks; block 0 is the null block: padding
        points at it, it is never allocated, counted or freed.
    block_size: token slots a block (B).
    prefix_caching: whether blocks get names and `open` finds them.
    max_seqs: sequences open at a time.
    max_blocks_per_seq: longest table; None: num_blocks.
    sanitize: watch every call with a `Sanitizer` (then in `sanitizer`, else None): the misuse of a
        block raises SanitizerError, with a report of who allocated and freed it. For tests and
        debugging: calls take up to three times as long. PAGEDKV_SANITIZE=1 turns it on as well.
    eviction: "slru", which resists scans of one-off prompts in pools large enough for it to matter,
        or "lru".

    Errors of every call: KeyError for a sequence or lease that is not open; ValueError, with the
    value, for what is malformed, out of range or named twice. Nothing has changed then, nor after
    OutOfBlocks and OutOfSequences. Arrays that are returned belong to the caller, but for the
    read-only view of `block_table`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        max_seqs: int = 256,
        max_blocks_per_seq: int | None = None,
        sanitize: bool = False,
        eviction: str = "slru",
    ) -> None:
        width = num_blocks if max_blocks_per_seq is None else max_blocks_per_seq
        for name, value in (
            ("num_blocks", num_blocks),
            ("block_size", block_size),
            ("max_seqs", max_seqs),
            ("max_blocks_per_seq", width),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise ValueError(f"{name}={value!r} must be an integer from 1 to 2**31 - 1")
        if eviction not in EVICTION_POLICIES:
            raise ValueError(f"eviction={eviction!r}: use one of {', '.join(EVICTION_POLICIES)}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_seqs, self.max_blocks_per_seq = max_seqs, width
        self.prefix_caching, self.eviction = prefix_caching, eviction
        self.pool = Pool(num_blocks, eviction)
        self.table = BlockTable(max_seqs, width, block_size)
        # Tokens whose K/V stands in each slot: what a block's name will say.
        self.contents = np.zeros((num_blocks + 1, block_size), np.int32)
        self.index = PrefixIndex(self.contents)
        self._state = State(
            block_size, prefix_caching, self.pool, self.table, self.index, self.contents
        )
        self.leases: dict[int, Int32] = {}
        self.next_lease = 1
        watch = sanitize or asked_for_by_environment()
        self.sanitizer = Sanitizer(self) if watch else None

    # ---- looking ------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        return self.pool.num_cached

    @property
    def num_held_blocks(self) -> int:
        return self.pool.num_held

    @property
    def num_draining_blocks(self) -> int:
        return self.pool.num_draining

    @property
    def num_shared_blocks(self) -> int:
        """Blocks with more than one holder. O(pool), vectorised."""
        return int(np.count_nonzero(self.pool.counts > 1))

    @property
    def num_unfilled_slots(self) -> int:
        """Slots of held blocks behind the last token of each sequence, committed or reserved.

        A block that several sequences end in counts once, for the longest. O(max_seqs).
        """
        table, size = self.table, self.block_size
        lengths = table.lengths + np.maximum(table.reserved, 0)
        rows = np.flatnonzero(lengths % size)
        tails = table.blocks[rows, lengths[rows] // size]
        filled = np.zeros(len(rows), np.int64)
        blocks, places = np.unique(tails, return_inverse=True)
        np.maximum.at(filled, places, lengths[rows] % size)
        # Others may have it in their middle: then it is published in full.
        filled = np.maximum(filled[: len(blocks)], self.pool.extents[blocks])
        return len(blocks) * size - int(filled.sum())

    @property
    def num_evicted_blocks(self) -> int:
        """Cached blocks that were given up for others, or by `evict`, since this manager was made.

        No part of its state: `restore` starts from 0.
        """
        return self.pool.num_evicted

    @property
    def num_open_sequences(self) -> int:
        return self.table.num_open

    def refcount(self, block: BlockId) -> int:
        """Table entries that name the block, plus open reservations that copy from it."""
        return int(self.pool.counts[self._block_ids([block])[0]])

    def length(self, seq: SeqId) -> int:
        """Committed tokens."""
        return int(self.table.lengths[self._row(seq)])

    def cached_tokens(self, seq: SeqId) -> int:
        """Tokens that `open` found."""
        return int(self.table.found[self._row(seq)])

    def publishes(self, seq: SeqId) -> bool:
        """Whether the block that the sequence fills next will get a name: its parent has one."""
        row = self._row(seq)
        full = int(self.table.lengths[row]) // self.block_size
        if not self.prefix_caching or not full:
            return self.prefix_caching and not self.table.outdated[row]
        return bool(self.pool.extents[self.table.blocks[row, full - 1]] == self.block_size)

    def block_table(self, seq: SeqId) -> Int32:
        """Blocks of committed and reserved tokens: a read-only int32 view, no copy."""
        row = self._row(seq)
        entries: Int32 = self.table.blocks[row, : self.table.num_blocks(row)]
        entries.flags.writeable = False  # of this view only
        return entries

    def exclusive_blocks(self, groups: Sequence[Sequence[SeqId]]) -> Int64:
        """Blocks that closing all sequences of a group would release, int64 [n groups].

        Those that nobody outside the group holds. Nothing is changed.
        """
        tables = [[self.block_table(seq) for seq in group] for group in groups]
        sizes = [sum(map(len, group)) for group in tables]
        flat = [table for group in tables for table in group]
        if not flat:
            return np.zeros(len(groups), np.int64)
        width = self.num_blocks + 1
        which = np.repeat(np.arange(len(groups)), sizes)
        keys, mentions = np.unique(which * width + np.concatenate(flat), return_counts=True)
        alone = self.pool.counts[keys % width] == mentions
        return np.bincount(keys[alone] // width, minlength=len(groups)).astype(np.int64)

    def rows(self, seqs: Sequence[SeqId] | Int64) -> Int32:
        """Row of the block table that each sequence has for its whole life, int32 [n]."""
        rows: Int32 = self.table.find(seqs).astype(np.int32)
        return rows

    def tables(self, seqs: Sequence[SeqId], out: Int32 | None = None) -> Tables:
        """The batch's tables for a kernel; padded into `out` (int32 [>= n, >= w]) when given."""
        rows = self.table.find(seqs)
        stamp = None if self.sanitizer is None else self.sanitizer.stamp(rows)
        return Tables(self.table, rows, out, stamp)

    def stamp(self) -> int:
        """The present moment, for `changed_rows`."""
        return self.table.clock

    def changed_rows(self, since: int) -> Int32:
        """Rows of open sequences with entries changed after the stamp `since`, ascending int32."""
        return (self.table.stamps > whole(since, "since")).nonzero()[0].astype(np.int32)

    def padded_rows(self, rows: Int32) -> Int32:
        """Whole table rows for upload: int32 [r, w], w = blocks of the longest, padded with 0."""
        lengths = self.table.lengths[rows] + np.maximum(self.table.reserved[rows], 0)
        width = int((-(-lengths // self.block_size)).max(initial=0))
        entries: Int32 = self.table.blocks[rows, :width]
        return entries

    def match(
        self,
        tokens: Tokens,
        namespace: str | bytes | None = None,
        public: int = 0,
        extra: bytes | None = None,
    ) -> Match:
        """What `open` would find and what the whole prompt would take. Changes nothing.

        demand = ceil(len(tokens) / B) less the full hits that are in use already (held, or being
        copied out): `demand <= num_free_blocks + num_cached_blocks` exactly when `open` and
        `reserve` of the rest would succeed.
        """
        return match(self._state, read_query(tokens, namespace, public, extra))

    def demand(self, seqs: Sequence[SeqId], counts: Sequence[int] | Int64) -> int:
        """Blocks that `reserve(seqs, counts)` takes if it need not save copies."""
        return self._plan(seqs, counts).demand

    def can_reserve(self, seqs: Sequence[SeqId], counts: Sequence[int] | Int64) -> bool:
        """Whether `reserve(seqs, counts)` would succeed now."""
        plan = self._plan(seqs, counts)
        plan.fit(self.pool.num_available)
        return plan.demand <= self.pool.num_available

    # ---- the life of a sequence ---------------------------------------------------------------

    @watched
    def open(
        self,
        tokens: Tokens = (),
        namespace: str | bytes | None = None,
        public: int = 0,
        extra: bytes | None = None,
    ) -> SeqId:
        """Opens a sequence on the longest cached prefix of `tokens` and holds those blocks.

            [0, c)      cached and committed, c <= len(tokens) - 1
            [c, ...)    not there: to be reserved and computed

        `tokens` are for looking up only: names come from what is committed. `namespace` separates
        tenants, all but the first `public` tokens; `extra` is whatever else makes K/V differ (an
        adapter, an image). Takes no block from the free ones. OutOfSequences when every row is
        taken; ValueError for bad tokens or a `public` outside 0..len(tokens).
        """
        return self._open(read_query(tokens, namespace, public, extra))

    @watched
    def reserve(self, seqs: Sequence[SeqId] | Int64, counts: Sequence[int] | Int64) -> Reservation:
        """Makes room for `counts[i]` more tokens of each sequence; the write rule decides where.

            [0, n)              committed
            [n - n % B, n)      copied first when others see the block (`copies`)
            [n, n + k)          reserved: not true yet, seen by kernels, not findable

        OutOfBlocks when free and cached blocks do not suffice; ValueError for a negative count, a
        length past `max_blocks_per_seq`, or a sequence that has an open reservation.
        """
        return self._reserve(seqs, counts)

    @watched
    def commit(self, seqs: Sequence[SeqId] | Int64, tokens: Sequence[Tokens] | Int32) -> None:
        """Ends reservations: `tokens[i]` (j <= k of them) are in place.

            [n, n + j)      committed
            [n + j, n + k)  given back

        A block that has become full is published under the tokens committed, if its parent is; if
        that name exists the table entry moves to the existing block and the own copy is let go.
        """
        which = self.table.find(seqs)
        flat, counts = flatten_tokens(tokens, len(which))
        reserved = self.table.reserved[which]
        if np.count_nonzero(reserved < counts):
            refuse_commit(self.table, which, counts)
        rows, starts = self.table, self.table.lengths[which]
        self.contents.reshape(-1)[rows.slots(which, starts, counts)] = flat
        ends = starts + counts
        end_copies(self._state, which)
        if np.count_nonzero(reserved > counts):
            keep, have = ends + self.block_size - 1, starts + reserved + self.block_size - 1
            drop_entries(self._state, which, keep // self.block_size, have // self.block_size)
        rows.lengths[which] = ends
        rows.reserved[which] = NO_RESERVATION
        if self.prefix_caching:
            firsts, lasts = starts // self.block_size, ends // self.block_size
            filled = (lasts > firsts).nonzero()[0]
            if len(filled):
                publish_full(self._state, which[filled], firsts[filled], lasts[filled])

    @watched
    def cancel(self, seqs: Sequence[SeqId]) -> None:
        """Ends reservations as if they had not been: tables and counts are as before `reserve`.

        Names withdrawn and blocks evicted for it do not come back.
        """
        which = self.table.find(seqs)
        missing = self.table.reserved[which] == NO_RESERVATION
        if missing.any():
            raise ValueError(
                f"sequence {self.table.seqs[which[missing][0]]} has no open reservation"
            )
        cancel(self._state, which)

    @watched
    def fork(self, seq: SeqId, n: int = 1) -> tuple[SeqId, ...]:
        """n more sequences with the same blocks, the partly filled tail included.

        OutOfSequences when rows are short; ValueError for n < 0 or an open reservation.
        """
        row, n = self._row(seq), whole(n, "n")
        if n < 0:
            raise ValueError(f"n={n} forks: give a number of at least 0")
        if self.table.reserved[row] != NO_RESERVATION:
            raise ValueError(f"sequence {seq} has an open reservation: commit or cancel it first")
        self.table.need(n)
        rows = self.table
        blocks = rows.blocks[row, : rows.num_blocks(row)].copy()
        self.pool.change(np.tile(blocks, n), +1)
        new: list[int] = []
        for _ in range(n):
            namespace, extra = rows.namespaces[row]
            child = rows.take(namespace, extra, rows.frames[row], int(rows.public[row]))
            rows.write(np.full(len(blocks), child), np.arange(len(blocks)), blocks)
            rows.lengths[child] = rows.lengths[row]
            rows.found[child] = rows.found[row]
            rows.outdated[child] = rows.outdated[row]
            new.append(child)
        return tuple(rows.seq(child) for child in new)

    @watched
    def truncate(self, seq: SeqId, n: int) -> None:
        """Forgets all but the first n tokens; cancels an open reservation first.

            [0, n)  kept, public part at most n
            [n, ..) released, tail first

        Publishes nothing. ValueError unless 0 <= n <= length.
        """
        row, n = self._row(seq), whole(n, "n")
        length = int(self.table.lengths[row])
        if not 0 <= n <= length:
            raise ValueError(f"cannot truncate sequence {seq} of {length} tokens to {n}")
        which = np.array([row])
        cancel(self._state, which[self.table.reserved[which] != NO_RESERVATION])
        have = np.array([self.table.num_blocks(row)])
        drop_entries(self._state, which, np.array([-(-n // self.block_size)]), have)
        self.table.lengths[row] = n
        self.table.public[row] = min(int(self.table.public[row]), n)
        self.table.outdated[row] &= n > 0

    @watched
    def close(self, seq: SeqId) -> None:
        """Ends a sequence: cancels an open reservation, releases its blocks, tail first.

        A partly filled tail that nobody else holds is published with the committed extent, if its
        parent is; if that name exists the own copy is freed.
        """
        row = self._row(seq)
        which = np.array([row])
        cancel(self._state, which[self.table.reserved[which] != NO_RESERVATION])
        if self.prefix_caching:
            publish_tail(self._state, row)
        count = self.table.num_blocks(row)
        self.pool.change(self.table.blocks[row, :count][::-1].copy(), -1)
        self.table.give_back(row)

    # ---- the pool -----------------------------------------------------------------------------

    @watched
    def evict(self, k: int) -> Int32:
        """Frees up to k cached blocks, oldest first; returns those it evicted (int32)."""
        if whole(k, "k") < 0:
            raise ValueError(f"k={k} blocks to evict: give a number of at least 0")
        evicted = evict(self._state, k)
        return evicted

    @watched
    def reset_cache(self) -> None:
        """Withdraws every name; cached blocks become free, held blocks stay with their holders.

        What is computed for the sequences that are open now is never published: whoever resets
        because K/V would differ from now on (new weights) gets no old K/V from them.
        """
        table = self.table
        table.outdated |= (table.lengths > 0) | (table.reserved > 0)
        withdraw_all(self._state)

    @watched
    def lease(self, blocks: Sequence[BlockId] | Int32) -> Lease:
        """Keeps blocks from being reused, whoever closes meanwhile, until the lease is released.

        A block that nobody holds is draining while leased. ValueError for a free or repeated block.
        """
        ids = self._block_ids(blocks)
        start_lease(self._state, ids)
        lease = Lease(self.next_lease, ids, self.end_lease)
        self.next_lease += 1
        self.leases[lease.id] = ids
        return lease

    @watched
    def end_lease(self, lease_id: int) -> None:
        """Ends a lease by its id (`Lease.release` does; by id after `restore`)."""
        if lease_id not in self.leases:
            raise KeyError(f"lease {lease_id} is not open")
        stop_lease(self._state, self.leases.pop(lease_id))

    def listen(self, capacity: int | None = None) -> EventLog:
        """The log of names published and withdrawn, kept from the first call on; always the same.

        capacity: at the first call, how many events it keeps at least; see `EventLog`.
        """
        if self.index.log is None:
            self.index.log = EventLog(self.index, self.pool.extents, capacity)
        return self.index.log

    # ---- state --------------------------------------------------------------------------------

    def check(self) -> None:
        """Recomputes every invariant from scratch; InvariantError says what differs."""
        check_manager(self)

    def snapshot(self) -> bytes:
        """Everything that can influence a later result, as bytes."""
        return pack_manager(self)

    @classmethod
    def restore(cls, data: bytes, sanitize: bool | None = None) -> BlockManager:
        """The manager that `snapshot` saw. ValueError for truncated or foreign data.

        sanitize: as for a new one; None: as the saved one.
        """
        return unpack_manager(cls, data, sanitize)

    def state_key(self) -> bytes:
        """Equal for states that behave alike, whatever their ids."""
        return state_key(self)

    def export_sequence(self, seq: SeqId) -> bytes:
        """A sequence's tokens, block ids and naming facts (no K/V), for `import_sequence`."""
        row = self._row(seq)
        if self.table.reserved[row] != NO_RESERVATION:
            raise ValueError(f"sequence {seq} has an open reservation: commit or cancel it first")
        return pack_sequence(self, row)

    @watched
    def import_sequence(self, data: bytes) -> Imported:
        """Opens an exported sequence by name and reserves the rest; the caller writes and commits.

        Block sizes may differ. Errors as `open` and `reserve`.
        """
        facts = unpack_sequence(data)
        # Not `read_query`: the public part may pass the tokens committed so far, and stays.
        query = Query(*facts[:4], make_frames(facts.namespace, facts.extra))
        demand = match(self._state, query).demand
        if demand > self.pool.num_available:
            raise OutOfBlocks(demand, self.pool.num_free, self.pool.num_cached)
        seq = self._open(query)
        rest = facts.tokens[self.length(seq) :]
        return Imported(seq, self._reserve([seq], [len(rest)]), rest)

    # ---- steps of the verbs -------------------------------------------------------------------

    def _open(self, query: Query) -> SeqId:
        row = open_row(self._state, query)
        return self.table.seq(row)

    def _reserve(self, seqs: Sequence[SeqId] | Int64, counts: Sequence[int] | Int64) -> Reservation:
        plan = self._plan(seqs, counts)
        plan.fit(self.pool.num_available)
        need = plan.demand
        if need > self.pool.num_available:
            raise OutOfBlocks(need, self.pool.num_free, self.pool.num_cached)
        withdraw(self._state, plan.withdraw)
        evict(self._state, need - self.pool.num_free)
        return apply(self._state, plan, self.pool.allocate(need))

    def _row(self, seq: SeqId) -> int:
        return int(self.table.find([seq])[0])

    def _block_ids(self, blocks: Sequence[BlockId] | Int32) -> Int32:
        ids = int_array(blocks, "block ids")
        bad = ids[(ids < 1) | (ids > self.num_blocks)]
        if len(bad):
            raise ValueError(f"block {bad[0]} is not one of 1..{self.num_blocks}")
        return ids.astype(np.int32)

    def _plan(self, seqs: Sequence[SeqId] | Int64, counts: Sequence[int] | Int64) -> WritePlan:
        which = self.table.find(seqs)
        return plan_writes(self.pool, self.table, which, read_counts(self.table, which, counts))
