"""Errors of the block pool. After any of them the manager's state is unchanged."""

from __future__ import annotations

from pagedkv.errors import PagedKVError


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


class InvariantError(PagedKVError):
    """`check` found that the manager's own state is inconsistent."""
