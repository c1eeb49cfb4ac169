"""The block tables of a batch in the forms that kernels take, in arrays of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagedkv.cache.table import BlockTable, repeat_ranges
from pagedkv.cache.types import NULL_BLOCK, Int32, Int64

if TYPE_CHECKING:
    from pagedkv.cache.sanitizer.sanitizer import Stamp


def _fits(out: object, height: int, width: int) -> bool:
    return (
        isinstance(out, np.ndarray)
        and out.dtype == np.int32
        and out.ndim == 2
        and out.shape[0] >= height
        and out.shape[1] >= width
    )


class Csr(NamedTuple):
    """FlashInfer's form: sequence i owns indices[indptr[i]:indptr[i + 1]]."""

    indptr: Int32  # [n + 1]
    indices: Int32  # [indptr[-1]]
    last_page_len: Int32  # [n], 1..B; B for an empty row


class SharedPrefix(NamedTuple):
    """Sequences of a batch whose tables begin with the same full blocks."""

    members: Int32  # places in the batch, ascending, at least two
    num_blocks: int  # common full leading blocks, at least one


class Tables:
    """Block tables of n sequences as they stood at the call; w = blocks of the longest.

    `lengths` int32 [n] counts committed and reserved tokens: what a kernel may see. Under the
    sanitizer, a form asked for after a row has changed raises SanitizerError, as `verify` does.
    """

    def __init__(
        self, rows: BlockTable, which: Int64, out: Int32 | None, stamp: Stamp | None
    ) -> None:
        self._stamp = stamp
        self._block_size = rows.block_size
        lengths = rows.lengths[which] + np.maximum(rows.reserved[which], 0)
        self._counts = -(-lengths // rows.block_size)
        width = int(self._counts.max(initial=0))
        if out is not None and not _fits(out, len(which), width):
            raise ValueError(
                f"out must be int32 of at least [{len(which)}, {width}], got {out!r:.200}"
            )
        self._inside = np.arange(width) < self._counts[:, None]
        self._entries = np.where(self._inside, rows.blocks[which, :width], NULL_BLOCK)
        self._out = out
        self.lengths: Int32 = lengths.astype(np.int32)
        if out is not None:
            self.padded()

    def verify(self) -> None:
        """Call it right before a kernel reads what was exported: SanitizerError if it is stale.

        Does nothing unless the manager has a sanitizer.
        """
        if self._stamp is not None:
            self._stamp.verify()

    def padded(self, pad: int = NULL_BLOCK) -> Int32:
        """int32 [n, w], entries past a row's blocks hold `pad`; a new array.

        With the caller's `out`: that one, filled again, [n, its own width].
        """
        self.verify()
        if self._out is None:
            return np.where(self._inside, self._entries, np.int32(pad))
        target = self._out[: len(self._entries)]
        target[:] = pad
        target[:, : self._entries.shape[1]][self._inside] = self._entries[self._inside]
        return target

    def csr(self) -> Csr:
        """Compressed rows, as new arrays."""
        self.verify()
        indptr = np.zeros(len(self._counts) + 1, np.int32)
        np.cumsum(self._counts, out=indptr[1:])
        last = (self.lengths - 1) % self._block_size + 1
        last[self.lengths == 0] = self._block_size
        return Csr(indptr, self._entries[self._inside], last.astype(np.int32))

    def slots(self) -> Int64:
        """Slot of every token of every sequence, int64 [sum lengths]."""
        self.verify()
        owner, position = repeat_ranges(self.lengths.astype(np.int64))
        index, offset = np.divmod(position, self._block_size)
        return self._entries[owner, index].astype(np.int64) * self._block_size + offset

    def shared_prefixes(self) -> list[SharedPrefix]:
        """Groups of sequences with common full leading blocks, in order of their first member.

        Sequences are grouped by their first block; the depth is what the whole group has in common.
        """
        self.verify()
        full = self.lengths // self._block_size
        groups: dict[int, list[int]] = {}
        for place in np.flatnonzero(full).tolist():
            groups.setdefault(int(self._entries[place, 0]), []).append(place)
        found = []
        for members in groups.values():
            if len(members) > 1:
                depth = int(full[members].min())
                tables = self._entries[members, :depth]
                same = (tables == tables[0]).all(axis=0)
                depth = depth if same.all() else int(same.argmin())
                found.append(SharedPrefix(np.array(members, np.int32), depth))
        return found
