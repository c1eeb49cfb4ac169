"""Blocks on their way to the tiers below the device, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pagedkv.cache import BlockId, BlockManager, SeqId
from pagedkv.cache.index import make_frames, token_bytes
from pagedkv.cache.lease import Lease
from pagedkv.scheduling.batch import Row
from pagedkv.scheduling.cost import CostModel
from pagedkv.scheduling.request import Branch, Request
from pagedkv.scheduling.step import Int32, Result, Step, Transfer
from pagedkv.scheduling.tally import Tally
from pagedkv.scheduling.usage import note_blocks
from pagedkv.tiers.interface import Below
from pagedkv.tiers.names import ROOT, BlockName, Namer

# Blocks that are stored before it is looked at how many come back.
_TRIED = 64
# Blocks of the first victim that is swapped, if nothing has gone over the link yet.
_PROBE = 4


@dataclass(slots=True)
class TieringStats:
    """Counts since the start, in blocks."""

    stored: int = 0
    loaded: int = 0
    failed_loads: int = 0  # were found below, and could not be had: computed again
    failed_stores: int = 0
    abandoned: int = 0  # evicted before they were stored: the pool was short


class _Block(NamedTuple):
    """A block to be stored. It is leased."""

    block: int
    name: BlockName
    tokens: bytes
    swap: bool  # of a preempted sequence that counts on it


class LowerTiers(NamedTuple):
    """What is below the device. below: the uppermost tier, asked only which names it has.

    tiers: names, the uppermost first.
    """

    below: Below
    namer: Namer
    block_bytes: int  # of one payload
    tiers: tuple[str, ...] = ("host",)


class Tiering:
    """Plans which blocks are stored below and which are loaded. No payload comes by here.

    Write-behind: a block that has become full, and that others may find by its name, is stored in
    the next step, while its sequence goes on; so cached blocks are clean when they are evicted, and
    none has a descendant below without having been stored itself, but for those that were not worth
    it. It is leased until the Result says that it is stored; if its sequence closes meanwhile it is
    draining.
    A sequence that is preempted to be swapped has the rest of its blocks stored, the partial tail
    included. What takes longer to move than to compute, by the cost model, is not moved; `recovery`
    other than "auto" overrules it, see SchedulerConfig.
    """

    def __init__(
        self,
        manager: BlockManager,
        lower: LowerTiers,
        cost: CostModel,
        tally: Tally,
        recovery: str = "auto",
    ) -> None:
        self.manager, self.block_bytes, self.stats = manager, lower.block_bytes, TieringStats()
        self._below, self._namer, self._cost = lower.below, lower.namer, cost
        self._tally = tally
        self.recovery = recovery
        self.watchers: list[Callable[[list[bool]], None]] = []  # told what a look below has found
        self._pending: list[_Block] = []
        self._leases: list[Lease] = []  # of what is pending
        # In flight, by id of the transfer: number of blocks, their leases.
        self._stores: dict[int, tuple[int, list[Lease]]] = {}
        self._loads: dict[int, Row] = {}
        self._closing: set[SeqId] = set()  # ended while a load still writes to their blocks
        self._num_transfers = 0

    @property
    def busy(self) -> bool:
        """Whether a transfer is in flight, or waits for a step."""
        return bool(self._pending or self._stores or self._loads)

    def pays_to_load(self, num_blocks: int, num_tokens: int, prior: int) -> bool:
        """Whether loading so many blocks takes less time than computing their tokens.

        Not known before the cost model is fitted and a block has been loaded: tried then.
        """
        return self._gain(num_blocks, num_tokens, prior) > 0

    def pays_to_store(self, prior: int) -> bool:
        """Whether to store a block that has become full behind `prior` tokens.

        Only if what is gained when it is loaded, times how many stored blocks have been loaded so
        far, is more than storing takes. A few are stored before that is known, and count as if they
        had been loaded.
        """
        gain, stats = self._gain(1, self.manager.block_size, prior), self.stats
        if gain in (math.inf, -math.inf):
            return gain > 0 and (self.recovery == "swap" or stats.stored < _TRIED)
        share = (stats.loaded + _TRIED) / (stats.stored + _TRIED)
        return share * gain > self._cost.swap_seconds(self.block_bytes, 1, 0, 0)

    def _gain(self, num_blocks: int, num_tokens: int, prior: int) -> float:
        """Seconds that loading saves; infinite where it is to be done in any case."""
        if self.recovery == "recompute":
            return -math.inf
        if self.recovery == "swap" or not self._cost.fitted or not self._cost.knows_links:
            return math.inf
        load = self._cost.swap_seconds(0, 0, num_blocks * self.block_bytes, num_blocks)
        return self._cost.recompute_seconds(num_tokens, prior) - load

    # ---- up -----------------------------------------------------------------------------------

    def find(self, branch: Branch, lookup: Int32) -> None:
        """Notes what lower tiers have of `lookup` beyond what the branch has, gaps or not.

        The last token of `lookup` is left to be computed.
        """
        size, request = self.manager.block_size, branch.request
        most = len(lookup) - 1
        spans = [(at, at + size) for at in range(branch.computed // size * size, most, size)]
        tail = request.swapped
        spans = [
            (start, min(stop, tail) if start < tail else stop)
            for start, stop in spans
            if stop <= most or start < tail <= most
        ]
        spans = [span for span in spans if span[1] > branch.computed]
        names = [self._name(branch, start, stop) for start, stop in spans]
        found = self._below.contains(names)
        for watcher in self.watchers:
            watcher(found)
        spans = [span for span, there in zip(spans, found, strict=True) if there]
        tokens = sum(stop - max(start, branch.computed) for start, stop in spans)
        pays = spans and self.pays_to_load(len(spans), tokens, branch.computed)
        branch.below = spans if pays else []

    def due(self, branches: Iterable[Branch]) -> list[Row]:
        """Loads that branches have come to: each a row of the blocks that follow each other."""
        rows = []
        for branch in branches:
            if branch.loading or not branch.below or branch.below[0][0] > branch.computed:
                continue
            if branch.request.parked:
                continue
            stop = branch.below[0][0]
            for start, end in branch.below:
                if start != stop:
                    break
                stop = end
            rows.append(Row(branch, branch.computed, stop - branch.computed))
        return rows

    def load(self, row: Row) -> Transfer:
        """Starts the load of a row whose slots are reserved."""
        branch, size = row.branch, self.manager.block_size
        stop = row.start + row.count
        spans = [span for span in branch.below if span[1] <= stop]
        table = self.manager.block_table(branch.seq)
        branch.loading = row.count
        transfer = Transfer(
            self._next_id(),
            branch.seq,
            np.array([table[start // size] for start, _ in spans], np.int32),
            tuple(self._name(branch, *span) for span in spans),
            tuple(_tokens(branch, *span) for span in spans),
        )
        self._loads[transfer.id] = row
        return transfer

    # ---- down ---------------------------------------------------------------------------------

    def note_filled(self, rows: Iterable[Row]) -> None:
        """Blocks that a commit has filled: they are stored in the next step."""
        manager, size = self.manager, self.manager.block_size
        if not manager.prefix_caching:
            return
        filled: dict[int, _Block] = {}
        for row in rows:
            branch = row.branch
            first, last = row.start // size, (row.start + row.count) // size
            if first == last or not manager.publishes(branch.seq):
                continue
            if not self.pays_to_store(row.start):
                branch.unstored += range(first, last)
                continue
            table = manager.block_table(branch.seq)
            for i in range(first, last):
                block = int(table[i])
                if block not in filled:
                    filled[block] = self._block(branch, block, i * size, (i + 1) * size)
        self._lease(list(filled.values()))

    def swap_out(self, request: Request, blocks: int) -> None:
        """Stores what a request that is about to be preempted would have to compute again.

        blocks: its last ones, that it gives up. Of a group nothing: it is resumed along its fork
        tree.
        """
        if len(request.branches) != 1 or len(request.live) != 1:
            return
        (branch,) = request.branches
        size, table = self.manager.block_size, self.manager.block_table(branch.seq)
        full, used = branch.computed // size, -(-branch.computed // size)
        waiting = {block.block for block in self._pending}
        # Where blocks are found by name the full ones have been stored behind, or left out.
        known = self.manager.prefix_caching
        places = {i for i in branch.unstored if i >= used - blocks} if known else set(range(full))
        places |= set(range(full, used))
        probes = self._cost.fitted and not self._cost.knows_links and self.recovery == "auto"
        if probes:
            # A few blocks tell what the link takes; all of a long sequence might take seconds.
            places = set(sorted(places)[:_PROBE])
        self._lease(
            [
                self._block(
                    branch, int(table[i]), i * size, min((i + 1) * size, branch.computed), swap=True
                )
                for i in sorted(places)
                if int(table[i]) not in waiting
            ]
        )
        request.swapped = 0 if probes else branch.computed

    def abandon(self) -> bool:
        """Gives up stores of blocks that nobody holds any more; whether there were any.

        For a pool that is short: what was not stored yet is dropped.
        """
        keep = [b for b in self._pending if b.swap or self.manager.refcount(BlockId(b.block))]
        gone = len(self._pending) - len(keep)
        if gone:
            leases, self._pending, self._leases = self._leases, [], []
            self._lease(keep)
            for lease in leases:
                lease.release()
        self.stats.abandoned += gone
        return gone > 0

    def store(self) -> tuple[Transfer, ...]:
        """Starts to store what has been noted."""
        if not self._pending:
            return ()
        blocks, leases = self._pending, self._leases
        self._pending, self._leases = [], []
        transfer = Transfer(
            self._next_id(),
            0,
            np.array([block.block for block in blocks], np.int32),
            tuple(block.name for block in blocks),
            tuple(block.tokens for block in blocks),
        )
        self._stores[transfer.id] = len(blocks), leases
        return (transfer,)

    # ---- ends ---------------------------------------------------------------------------------

    def mismatch(self, result: Result) -> str:
        """What is wrong with the transfers that a Result reports; "" for nothing."""
        for done in result.transfers:
            if done.id in self._stores:
                most = self._stores[done.id][0]
            elif done.id in self._loads:
                most = len(self._spans(self._loads[done.id]))
            else:
                return f"the executor reports transfer {done.id}, which is not in flight"
            if not 0 <= done.lower <= done.blocks <= most:
                return f"the executor reports {done.blocks} of {most} blocks of transfer {done.id}"
        return ""

    def take(self, result: Result) -> None:
        """Ends what a Result reports: leases of what is stored, reservations of what is loaded.

        A load that failed is canceled from there on, and not tried again.
        """
        for done in result.transfers:
            size = done.blocks * self.block_bytes
            if done.id in self._stores:
                count, leases = self._stores.pop(done.id)
                self._cost.link_out.observe(size, done.blocks, done.duration)
                self.stats.stored += done.blocks
                self.stats.failed_stores += count - done.blocks
                for lease in leases:
                    lease.release()
            else:
                self._cost.link_in.observe(size, done.blocks, done.duration)
                self._end_load(self._loads.pop(done.id), done.blocks, done.lower)

    def forget(self, step: Step) -> None:
        """A step has failed: none of its transfers counts as done; those of earlier ones go on."""
        for store in step.stores:
            for lease in self._stores.pop(store.id)[1]:
                lease.release()
        for load in step.loads:
            self._end_load(self._loads.pop(load.id), 0)

    def closes(self, branch: Branch) -> bool:
        """Whether the sequence of a branch that ends is left to this until its load has ended."""
        if branch.loading:
            self._closing.add(branch.seq)
        return branch.loading > 0

    def _end_load(self, row: Row, blocks: int, lower: int = 0) -> None:
        branch, spans = row.branch, self._spans(row)
        branch.loading = 0
        if branch.seq in self._closing:
            self._closing.remove(branch.seq)
            self.manager.close(branch.seq)
            return
        self.stats.loaded += blocks
        self.stats.failed_loads += len(spans) - blocks
        count = spans[blocks - 1][1] - row.start if blocks else 0
        note_blocks(self.manager, branch.request)
        if count:
            tokens = branch.tokens(row.start, row.start + count)
            self.manager.commit([branch.seq], [tokens])
        else:
            self.manager.cancel([branch.seq])
        branch.compute(count)
        request = branch.request
        if request.comes_back:
            request.swapped_blocks += blocks
        else:
            request.num_cached_tokens += count
        if count:
            self._tally.loaded(count, count * lower // blocks, request.comes_back)
        branch.below = branch.below[blocks:] if blocks == len(spans) else []

    def _spans(self, row: Row) -> list[tuple[int, int]]:
        return [span for span in row.branch.below if span[1] <= row.start + row.count]

    # ---- names --------------------------------------------------------------------------------

    def _block(
        self, branch: Branch, block: int, start: int, stop: int, swap: bool = False
    ) -> _Block:
        name = self._name(branch, start, stop)
        return _Block(block, name, _tokens(branch, start, stop), swap)

    def _lease(self, blocks: list[_Block]) -> None:
        if blocks:
            ids = np.array([block.block for block in blocks], np.int32)
            self._leases.append(self.manager.lease(ids))
            self._pending += blocks

    def _name(self, branch: Branch, start: int, stop: int) -> BlockName:
        """The name of one block of a branch, full or not."""
        size = self.manager.block_size
        while len(branch.names) < start // size:
            at = len(branch.names) * size
            branch.names.append(self._child(branch, at, at + size))
        if start // size < len(branch.names) and stop - start == size:
            return branch.names[start // size]
        return self._child(branch, start, stop)

    def _child(self, branch: Branch, start: int, stop: int) -> BlockName:
        request, size = branch.request, self.manager.block_size
        frames = make_frames(request.namespace, None)
        frame = frames.public if start + size <= request.public else frames.private
        parent = branch.names[start // size - 1] if start else ROOT
        tokens = np.array(branch.tokens(start, stop), np.int32)
        return self._namer.child(parent, frame, tokens)

    def _next_id(self) -> int:
        self._num_transfers += 1
        return self._num_transfers


def _tokens(branch: Branch, start: int, stop: int) -> bytes:
    return token_bytes(np.array(branch.tokens(start, stop), np.int32))
