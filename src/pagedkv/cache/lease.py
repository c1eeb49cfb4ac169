"""Leases: blocks that must not be reused while somebody outside the tables reads them."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import numpy as np

from pagedkv.cache.state import State
from pagedkv.cache.types import Int32


def start_lease(state: State, ids: Int32) -> None:
    """Leases held, cached or draining blocks. ValueError for a free or repeated one."""
    free = ids[state.pool.is_free(ids)]
    if len(free):
        raise ValueError(f"block {free[0]} is free: it has no content to lease")
    if len(np.unique(ids)) != len(ids):
        raise ValueError(f"a block is named twice in the lease {ids.tolist()}")
    ids.flags.writeable = False  # the caller sees it as `Lease.blocks`
    state.pool.lease(ids)


def stop_lease(state: State, ids: Int32) -> None:
    """Ends one lease of each block."""
    pool = state.pool
    pool.end_lease(ids)
    # The caller's order may put a head before its tail, and an ancestor may have been parked
    # while the tail was still leased: eviction must find leaves first.
    pool.refresh(state.index.lineage(ids[pool.is_cached(ids)].tolist()))


class Lease:
    """Keeps blocks from being reused or overwritten until it is released. One owner.

    A context manager; `release` may be called more than once.
    """

    def __init__(self, lease_id: int, blocks: Int32, end: Callable[[int], None]) -> None:
        self.id = lease_id
        self.blocks = blocks
        self._end: Callable[[int], None] | None = end

    def release(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end(self.id)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
