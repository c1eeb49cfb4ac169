"""Saying what went wrong: kind, block, sequence, step, and who allocated and freed the block."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from pagedkv.cache.errors import Misuse, SanitizerError
from pagedkv.cache.sanitizer.recording import Recording
from pagedkv.cache.sanitizer.shadow import Shadow
from pagedkv.cache.sanitizer.sites import Sites
from pagedkv.cache.types import NULL_BLOCK

NO_STEP = -1


class Reporter:
    """Knows the present call, and raises SanitizerError with the history of what it names."""

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow
        self.sites = Sites()
        self.step = NO_STEP  # of the engine
        self.site = 0  # of the call under way
        self.recording: Recording | None = None

    def fail(
        self, kind: Misuse, what: str, *, block: int | None = None, seq: int | None = None
    ) -> NoReturn:
        """Raises SanitizerError. `what`: one sentence with the values."""
        step = None if self.step == NO_STEP else self.step
        lines = [f"{kind}: {what}"]
        if block is not None:
            lines += self._block_lines(block)
        if seq is not None:
            lines += self._sequence_lines(seq)
        first, *rest = self.sites.lines(self.site)
        lines += [f"found{'' if step is None else f' in step {step}'}, by {first}", *rest]
        if self.recording is not None:
            lines.append(self.recording.save("\n  ".join(lines)))
            self.recording = None  # what a damaged state leads to later is not of interest
        raise SanitizerError(kind, "\n  ".join(lines), block, seq, step)

    def note_who_closed(self, error: KeyError, seqs: object) -> None:
        """Adds to the refusal of a call who closed the sequences that it names (PEP 678)."""
        ids = np.atleast_1d(np.asarray(seqs))
        if ids.dtype.kind not in "iu" or ids.ndim != 1:
            return
        shadow = self._shadow
        rows = ids % shadow.max_seqs
        for row in rows[shadow.closed.seqs[rows] == ids].tolist():
            error.add_note("\n  ".join(shadow.closed.lines(self.sites, row, "closed")))

    def _block_lines(self, block: int) -> list[str]:
        shadow = self._shadow
        if not NULL_BLOCK <= block < len(shadow.references):
            return [f"block {block}: not in the pool"]
        holders = shadow.holders(block)
        state = (
            f"block {block}: generation {shadow.generations[block]}, "
            f"{shadow.filled[block]} of {shadow.block_size} slots filled, "
            f"held by {f'sequences {holders}' if holders else 'no sequence'}"
        )
        if shadow.leases[block]:
            state += f", {shadow.leases[block]} leases open"
        return [
            state,
            *shadow.allocated.lines(self.sites, block, "  allocated"),
            *shadow.freed.lines(self.sites, block, "  last released"),
        ]

    def _sequence_lines(self, seq: int) -> list[str]:
        shadow, row = self._shadow, seq % self._shadow.max_seqs
        if shadow.seqs[row] != seq:
            closed = shadow.closed.lines(self.sites, row, "  closed")
            return [
                f"sequence {seq}: not open",
                *(closed if shadow.closed.seqs[row] == seq else []),
            ]
        return [
            f"sequence {seq}: {shadow.lengths[row]} tokens committed, "
            f"{shadow.reserved[row]} reserved, blocks "
            f"{shadow.blocks[row, : shadow.num_blocks(row)].tolist()}",
            *shadow.opened.lines(self.sites, row, "  opened"),
            *shadow.changed.lines(self.sites, row, "  table last changed"),
        ]
