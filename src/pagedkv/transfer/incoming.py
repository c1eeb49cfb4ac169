"""`Incoming`: K/V of one sequence as they come in, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagedkv.cache import BlockManager, SeqId
from pagedkv.cache.types import Int32, Int64
from pagedkv.transfer.actions import Copy
from pagedkv.transfer.messages import Naming

Bool = npt.NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class Incoming:
    """A line at its receiver: a sequence, open until `close`. Of its tokens:

    [0, base)            committed
    [base, base + room)  reserved at `slots`; `filled` says which are written and verified
    [0, len(tokens))     ids known
    """

    manager: BlockManager
    seq: SeqId
    tokens: Int32
    base: int = field(init=False)
    slots: Int64 = field(init=False)  # [room]
    filled: Bool = field(init=False)  # [room]
    is_open: bool = True
    is_reserved: bool = False

    def __post_init__(self) -> None:
        self.base = self.manager.length(self.seq)
        self._set_slots(np.zeros(0, np.int64))

    @property
    def have(self) -> int:
        """Leading tokens whose K/V is there and verified."""
        missing = np.flatnonzero(~self.filled)
        return self.base + (int(missing[0]) if len(missing) else len(self.filled))

    @property
    def end(self) -> int:
        return self.base + len(self.slots)

    @property
    def full_blocks(self) -> Int32:
        """Blocks that are committed in full; none of a line that is closed."""
        full = self.base // self.manager.block_size if self.is_open else 0
        return self.manager.block_table(self.seq)[:full].copy() if full else np.zeros(0, np.int32)

    def missing(self, start: int, stop: int) -> bool:
        """Whether any of the tokens [start, stop), start >= base, stop <= end, is to come."""
        return not self.filled[start - self.base : stop - self.base].all()

    def fill(self, start: int, stop: int) -> None:
        """The tokens [start, stop), start >= base, are written and verified."""
        self.filled[start - self.base : max(start, stop) - self.base] = True

    def grow(self, stop: int) -> list[Copy]:
        """Commits what is there and reserves up to `stop`. Errors as `BlockManager.reserve`."""
        self.commit()
        return reserve([(self, stop)])

    def commit(self) -> None:
        """Ends the reservation: the leading part that was verified is in place."""
        if self.is_reserved:
            have = self.have
            self.manager.commit([self.seq], [self.tokens[self.base : have]])
            self.base, self.is_reserved = have, False
            self._set_slots(self.slots[:0])

    def close(self) -> None:
        """Lets go of the blocks; what was verified stays cached under its names."""
        if self.is_open:
            self.commit()
            self.manager.close(self.seq)
            self.is_open = False

    def _set_slots(self, slots: Int64) -> None:
        self.slots, self.filled = slots, np.zeros(len(slots), np.bool_)


def reserve(lines: Sequence[tuple[Incoming, int]]) -> list[Copy]:
    """Room for each line, none of which has any, up to a place; what is to be copied first.

    All or nothing, with the errors of `BlockManager.reserve`.
    """
    counts = [max(0, stop - line.base) for line, stop in lines]
    manager = lines[0][0].manager
    reservation = manager.reserve([line.seq for line, _ in lines], counts)
    ends = np.cumsum(counts)[:-1]
    for (line, _), slots in zip(lines, np.split(reservation.slots, ends), strict=True):
        line.is_reserved = True
        line._set_slots(slots)
    return [Copy(reservation.copies)] if len(reservation.copies) else []


def open_on(manager: BlockManager, tokens: Int32, naming: Naming) -> SeqId:
    """A sequence on what is cached of `tokens`, be it all of them. OutOfSequences as `open`."""
    return manager.open(_and_one(manager, tokens), naming.namespace, naming.public, naming.extra)


def cached_of(manager: BlockManager, tokens: Int32, naming: Naming) -> int:
    """Tokens on which `open_on` would open."""
    tokens = _and_one(manager, tokens)
    found = manager.match(tokens, naming.namespace, naming.public, naming.extra)
    return found.cached_tokens


def _and_one(manager: BlockManager, tokens: Int32) -> Int32:
    """The last token of a look-up is never taken from the cache: let it be none of these."""
    if len(tokens) >= manager.max_blocks_per_seq * manager.block_size:
        return tokens
    return np.append(tokens, np.int32(0))
