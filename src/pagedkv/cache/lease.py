"""Leases: blocks that must not be reused while somebody outside the tables reads them."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from pagedkv.cache.types import Int32


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
