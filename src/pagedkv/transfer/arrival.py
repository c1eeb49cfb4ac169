"""`Arrival`: one move at its receiver, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pagedkv.cache import Lease
from pagedkv.cache.types import Int32
from pagedkv.transfer.actions import Copy, Write
from pagedkv.transfer.incoming import Incoming, cached_of, open_on, reserve
from pagedkv.transfer.messages import Commit, Grant, MoveId, Naming, Renew


class ReceiverState(StrEnum):
    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMPLETE = "complete"
    OWNED = "owned"


@dataclass(slots=True, eq=False)
class Arrival:
    """A move at its receiver. common: line 0. own: the lines of its samples.

    cached: tokens of all lines that were here already, those in common once. Before the samples
    have `parted` each of their lines is an empty sequence that keeps room for it; None: the sample
    has ended.
    """

    id: MoveId
    worker: str
    lease: int
    naming: Naming
    headroom: int
    common: Incoming
    own: list[Incoming | None]
    cached: int
    heard: float
    spoke: float
    parted: bool = False
    until: float = float("inf")  # COMPLETE, OWNED: when waiting ends
    state: ReceiverState = ReceiverState.RESERVED
    writing: Write | None = None
    commit: Commit | None = None
    hold: Lease | None = None

    @property
    def lines(self) -> list[Incoming]:
        """Those that are open."""
        return [line for line in (self.common, *self.own) if line is not None and line.is_open]

    def line(self, index: int) -> Incoming | None:
        """None: there is no such line, or not yet."""
        if index == 0:
            return self.common
        return self.own[index - 1] if self.parted and 0 < index <= len(self.own) else None

    def grant(self) -> Grant:
        return Grant(*self.id, lease=self.lease, have=self.common.have, parts=len(self.own) > 0)

    def renewal(self) -> Renew:
        own = self.own if self.parted else ()
        return Renew(
            *self.id,
            lease=self.lease,
            have=self.common.have,
            complete=self.state is ReceiverState.COMPLETE,
            own=tuple(0 if line is None else line.have for line in own),
        )

    def part(self, own: list[Int32 | None]) -> list[Copy]:
        """All in common is there: opens the line of each sample, on what is cached of it, or
        forked off line 0.

        Errors as `open` and `reserve` of the block manager.
        """
        manager, common = self.common.manager, self.common
        self.parted, self.state = True, ReceiverState.RECEIVING
        common.commit()
        for i, tokens in enumerate(own):
            room, self.own[i] = self.own[i], None
            if room is not None:
                room.close()
            if tokens is not None:
                known = np.concatenate([common.tokens[: common.base], tokens])
                if cached_of(manager, known, self.naming) > common.base:
                    seq = open_on(manager, known, self.naming)
                    self.cached += manager.length(seq) - common.base
                else:
                    (seq,) = manager.fork(common.seq)
                self.own[i] = Incoming(manager, seq, known)
        common.close()  # or its tail would be copied for all of them
        return reserve([(line, len(line.tokens) + self.headroom) for line in self.lines])
