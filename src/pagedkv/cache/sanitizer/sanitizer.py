"""`Sanitizer`: watches every call of a BlockManager and everything that kernels are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from pagedkv.cache.errors import InvariantError, Misuse
from pagedkv.cache.sanitizer.access import Access, Export
from pagedkv.cache.sanitizer.checks import Checks
from pagedkv.cache.sanitizer.rebuild import rebuild
from pagedkv.cache.sanitizer.recording import MAX_BYTES, Call, Recording, listed
from pagedkv.cache.sanitizer.report import NO_STEP, Reporter
from pagedkv.cache.sanitizer.shadow import Shadow
from pagedkv.cache.sanitizer.watch import Watch
from pagedkv.cache.table import int_array
from pagedkv.cache.types import Int32, Int64
from pagedkv.errors import PagedKVError

if TYPE_CHECKING:
    from pagedkv.cache.manager import BlockManager

_R = TypeVar("_R")

# How a verb refuses what it is given (TypeError: arguments that it does not have).
REFUSALS = (PagedKVError, ValueError, KeyError, TypeError)

# `check` recomputes everything in O(pool), so it runs after every call only in a small pool, and in
# a larger one seldom enough to cost less than the calls between.
_SMALL_POOL = 32
_BLOCKS_A_CALL = 2


class Stamp:
    """Knows what an exported table was made of. Belongs to the export."""

    def __init__(self, owner: Sanitizer, export: Export) -> None:
        self._owner, self._export = owner, export

    def verify(self) -> None:
        """SanitizerError if a row has changed, or its sequence was closed, since the export."""
        self._owner.verify_export(self._export)


class Sanitizer:
    """Shadow state of a BlockManager; `manager.sanitizer` when `sanitize=True`.

    It compares after every call of the manager. What kernels do it must be told: call, before the
    kernels of a step run, `check_copies`, `check_writes` and `check_reads`, in this order, with the
    arrays that they are given. From the first `check_writes` on, a commit of tokens whose slots no
    `check_writes` has named is an error too. The K/V store asks `take_to_poison`, `take_to_seal`
    and `take_to_verify` what it should do.

    Everything raises SanitizerError. What raised it has changed the state: do not go on. Arrays
    that have not the form that is asked for raise ValueError.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._shadow = Shadow(
            manager.num_blocks, manager.block_size, manager.max_seqs, manager.max_blocks_per_seq
        )
        self.report = Reporter(self._shadow)
        self._watch = Watch(manager, self._shadow, self.report)
        self._checks = Checks(manager, self._shadow, self.report)
        self._access = Access(self._shadow, self.report)
        self._calls = 0
        small = manager.num_blocks <= _SMALL_POOL
        self._check_every = 1 if small else manager.num_blocks // _BLOCKS_A_CALL

    # ---- the manager's side -------------------------------------------------------------------

    def call(
        self, verb: str, method: Callable[..., _R], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> _R:
        """Runs a verb of the manager and compares what it did with what it promises."""
        args = [listed(value) for value in args]
        kwargs = {key: listed(value) for key, value in kwargs.items()}
        self._record(verb, args, kwargs)
        try:
            result = method(self._manager, *args, **kwargs)
        except Exception as error:
            self.report.site = self.report.sites.here(verb)
            if not isinstance(error, REFUSALS):
                self.fail(Misuse.BROKEN_INVARIANT, f"{verb} ended with {error!r}")
            if isinstance(error, KeyError) and args and verb != "end_lease":
                self.report.note_who_closed(error, args[0])
            self._check_at_times()
            raise
        self.report.site = self.report.sites.here(verb)
        getattr(self._watch, verb)(result, *args, **kwargs)
        self._check_at_times()
        return result

    def restored(self) -> None:
        """The manager has taken over a saved state: so does the shadow."""
        rebuild(self._shadow, self._manager)
        self._watch.leases = dict(self._manager.leases)
        self.check()

    def check(self) -> None:
        """The manager's own `check`, then every row, count and lease against the shadow."""
        try:
            self._manager.check()
        except InvariantError as error:
            self.fail(Misuse.BROKEN_INVARIANT, str(error))
        shadow, table, pool = self._shadow, self._manager.table, self._manager.pool
        for name, mine, theirs in (
            ("table rows", shadow.blocks, table.blocks),
            ("lengths", shadow.lengths, table.lengths),
            ("sequences", shadow.seqs, table.seqs),
            ("pending copies", shadow.copy_sources, table.copy_sources),
            ("reservations", shadow.reserved, np.maximum(table.reserved, 0)),
            ("reference counts", shadow.references, pool.counts),
            ("leases", shadow.leases, pool.leases),
        ):
            if not np.array_equal(mine, theirs):
                at = np.argwhere(mine != theirs)[0].tolist()
                self.fail(
                    Misuse.BROKEN_INVARIANT,
                    f"{name} at {at}: {theirs[tuple(at)]}, {mine[tuple(at)]} by the calls made",
                )
        self._checks.published(np.flatnonzero(pool.extents))

    def check_idle(self) -> None:
        """Nothing is to do any more: an open sequence or a held block is a leak."""
        self._record("check_idle", (), {})
        self.report.site = self.report.sites.here("check_idle")
        for seq in self._shadow.seqs[self._shadow.seqs > 0].tolist():
            self.report.fail(Misuse.LEAK, f"the engine is idle, sequence {seq} is open", seq=seq)
        self._checks.nothing_held()

    def begin_step(self, index: int) -> None:
        """Names the engine's step in what is reported from now on."""
        self._record("begin_step", (index,), {})
        self.report.step = index

    def record(self, path: str | Path, max_bytes: int = MAX_BYTES) -> None:
        """Saves the state and the calls since to `path` when an error is found.

        max_bytes: of calls, after which a new state is saved; at least as much is kept.
        `pagedkv replay` runs such a file. Raises OSError if it cannot be written.
        """
        self.report.recording = Recording(Path(path), self._manager, self._so_far, max_bytes)

    # ---- the kernels' side --------------------------------------------------------------------

    def stamp(self, rows: Int64) -> Stamp:
        """For a table that is being exported."""
        table, shadow = self._manager.table, self._shadow
        width = max((shadow.num_blocks(row) for row in rows.tolist()), default=0)
        return Stamp(
            self,
            Export(
                rows.copy(),
                table.seqs[rows],
                table.stamps[rows],
                table.blocks[rows, :width],
                self.report.sites.here("tables"),
                self.report.step,
            ),
        )

    def verify_export(self, export: Export) -> None:
        self.report.site = self.report.sites.here("the use of an exported table")
        self._access.export_is_current(export, self._manager.table.stamps[export.rows])

    def check_copies(self, copies: Int32) -> None:
        """Copies about to be made, int32 [c, 3]: source, destination, filled slots."""
        self._kernel("check_copies", (_rows(copies, "copies"),))

    def check_writes(
        self, seqs: Sequence[int] | Int64, counts: Sequence[int] | Int32 | Int64, slots: Int64
    ) -> None:
        """Slots about to be written, flat int64 [sum counts], in the order of the sequences."""
        self._kernel(
            "check_writes",
            (int_array(seqs, "seqs"), int_array(counts, "counts"), int_array(slots, "slots")),
        )

    def check_reads(
        self, seqs: Sequence[int] | Int64, lengths: Sequence[int] | Int32 | Int64, tables: Int32
    ) -> None:
        """Positions [0, length) about to be read through table rows int32 [n, >= blocks]."""
        whose, ends = int_array(seqs, "seqs"), int_array(lengths, "lengths")
        self._kernel("check_reads", (whose, ends, _rows(tables, "tables")))

    def check_blocks(self, blocks: Int32) -> None:
        """Whole blocks about to be read, by a transfer: they must be held or leased."""
        self._kernel("check_blocks", (int_array(blocks, "blocks"),))

    def check_fills(self, blocks: Int32) -> None:
        """Whole blocks about to be written, by a transfer.

        They must be held or leased. Where sequences have reserved slots in them, these count as
        written, in whichever order the blocks come.
        """
        self._kernel("check_fills", (int_array(blocks, "blocks"),))

    def take_to_poison(self) -> Int32:
        """Blocks that were allocated since the last call, and free ones that have been written."""
        shadow = self._shadow
        free = self._manager.pool.is_free(np.arange(len(shadow.dirty), dtype=np.int32))
        blocks = np.flatnonzero(shadow.fresh | (shadow.dirty & free)).astype(np.int32)
        shadow.dirty[blocks] = shadow.fresh[:] = False
        return blocks

    def take_to_seal(self) -> tuple[Int32, Int64, Int32]:
        """Blocks published since the last call, their generations and published slots."""
        return self._take(self._shadow.to_seal)

    def take_to_verify(self) -> tuple[Int32, Int64, Int32]:
        """Blocks hit since the last call, their generations and published slots."""
        return self._take(self._shadow.to_verify)

    def fail(
        self, kind: Misuse, what: str, *, block: int | None = None, seq: int | None = None
    ) -> NoReturn:
        """Raises SanitizerError with the history of block and sequence; see `record`."""
        self.report.fail(kind, what, block=block, seq=seq)

    # ---- parts --------------------------------------------------------------------------------

    def _check_at_times(self) -> None:
        self._calls += 1
        if self._calls % self._check_every == 0:
            self.check()

    def _kernel(self, name: str, args: tuple[Any, ...]) -> None:
        self._record(name, args, {})
        self.report.site = self.report.sites.here(name)
        getattr(self._access, name.removeprefix("check_"))(*args)

    def _so_far(self) -> list[Call]:
        """Calls that tell the sanitizer of a restored manager what was reported of this step."""
        calls: list[Call] = []
        if self.report.step != NO_STEP:
            calls.append(("begin_step", (self.report.step,), {}))
        copies, *writes = self._access.reported()
        if len(copies):
            calls.append(("check_copies", (copies,), {}))
        if self._shadow.writes_reported:
            calls.append(("check_writes", tuple(writes), {}))
        if len(landed := self._access.landed()):
            calls.append(("check_fills", (landed,), {}))
        return calls

    def _take(self, flags: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[Int32, Int64, Int32]:
        blocks = np.flatnonzero(flags & (self._manager.pool.extents > 0)).astype(np.int32)
        flags[:] = False
        return blocks, self._shadow.generations[blocks], self._manager.pool.extents[blocks]

    def _record(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if self.report.recording is not None:
            self.report.recording.add(name, args, kwargs)


def _rows(values: Int32, what: str) -> Int32:
    """Outside rows of block ids, [n, w]; ValueError for anything else."""
    rows = np.asarray(values)
    if rows.ndim != 2 or rows.dtype.kind not in "iu":
        raise ValueError(f"{what} must be an integer array of rows, got {values!r:.200}")
    return rows
