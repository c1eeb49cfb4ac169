"""Errors of the block pool. After any of them the manager's state is unchanged."""

from __future__ import annotations

from enum import StrEnum

from pagedkv.errors import PagedKVError, ReportError


class OutOfBlocks(PagedKVError):
    """The pool cannot give the blocks that a call needs."""

    def __init__(self, needed: int, free: int, cached: int) -> None:
        super().__init__(
            f"{needed} blocks needed, {free} free and {cached} cached: "
            "close or preempt a sequence, or make the pool larger"
        )
        self.needed, self.free, self.cached = needed, free, cached


class OutOfSequences(PagedKVError):
    """Every row of the block table is taken."""

    def __init__(self, needed: int, open_: int, max_seqs: int) -> None:
        super().__init__(
            f"{needed} more sequences wanted, {open_} of max_seqs={max_seqs} are open: "
            "close a sequence or raise max_seqs"
        )
        self.needed, self.open, self.max_seqs = needed, open_, max_seqs


class EventGap(PagedKVError):
    """Events of the cache that a reader asks for are no longer kept."""

    def __init__(self, seq: int, first: int) -> None:
        super().__init__(
            f"event {seq} is no longer kept, the first that is has number {first}: "
            "start again from a picture"
        )
        self.seq, self.first = seq, first


class InvariantError(PagedKVError):
    """`check` found that the manager's own state is inconsistent."""


class Misuse(StrEnum):
    """The kinds of error that the sanitizer finds."""

    FREED_READ = "read of a freed or recycled block"
    PAST_EXTENT = "read past the filled extent"
    SHARED_WRITE = "write to a block that others can see"
    FOREIGN_WRITE = "write by a sequence that does not own the position"
    SLOT_TWICE = "slot written twice"
    SLOT_NEVER = "slot never written"
    COUNT = "reference count mismatch"
    DOUBLE_FREE = "double free"
    LEAK = "leak"
    STALE_TABLE = "table exported, changed and then used"
    HELD_REUSE = "block given out while it is in use"
    PENDING_REUSE = "block reused while a copy or transfer from it is pending"
    WRONG_HIT = "hit whose content is not what its name says"
    WRONG_TABLE = "block table that is not what the call should have made of it"
    BROKEN_INVARIANT = "broken invariant"
    NAN = "NaN in the attention output"


class SanitizerError(ReportError):
    """A block was misused. The state is not to be trusted any more: stop, and report it.

    kind: what was found. block, seq, step: whom it concerns, None where that does not apply.
    The message has in addition where the block was allocated and freed.
    """

    def __init__(
        self, kind: Misuse, message: str, block: int | None, seq: int | None, step: int | None
    ) -> None:
        super().__init__(message)
        self.kind, self.block, self.seq, self.step = kind, block, seq, step
