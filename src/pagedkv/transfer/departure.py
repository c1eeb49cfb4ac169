"""`Departure`: one move at its sender, and where it stands."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from pagedkv.cache import BlockManager, SeqId
from pagedkv.transfer.messages import Commit, MoveId, Reserve
from pagedkv.transfer.outgoing import Outgoing, Parted

Mode = Literal["prefilled", "live"]


class SenderState(StrEnum):
    COMPUTING = "computing"
    READY = "ready"


class Flying(NamedTuple):
    """A message with payload that is under way. stop: of the tokens of its line."""

    number: int
    line: int
    stop: int
    blocks: int


@dataclass(slots=True, eq=False)
class Departure:
    """A move at its sender. common: line 0. own: the lines of samples.

    These are there once the receiver says what it has of them.
    """

    id: MoveId
    to: str
    mode: Mode
    reserve: Reserve
    heard: float
    spoke: float
    retry_at: float
    give_up: float  # asking for room
    state: SenderState = SenderState.COMPUTING
    lease: int | None = None
    denied: str = "it did not answer"  # why there was no room
    common: Outgoing = field(default_factory=Outgoing)
    own: list[Outgoing] = field(default_factory=list)
    parts: bool = False  # the receiver takes lines of samples
    parting: bool = False  # that they have parted is under way
    number: int = 0  # of the last message
    flying: deque[Flying] = field(default_factory=deque)
    answered: int = 0  # number of the last message that a Nack has answered
    failures: int = 0  # in a row
    remaining: int = 2**31  # tokens missing there when the last round of a live move began
    asked_to_park: bool = False
    final: Commit | None = None
    committing: bool = False  # the Commit is under way
    taken: bool = False  # and has arrived

    @property
    def lines(self) -> list[Outgoing]:
        return [self.common, *self.own]

    @property
    def waits(self) -> bool:
        """Whether an answer is due."""
        asked = self.parting and not self.own
        return bool(self.flying) or asked or (self.committing and not self.taken)

    def ends(self, manager: BlockManager, seq: SeqId, parted: Parted | None) -> list[int]:
        """Committed tokens of each line; 0 of a sample that has ended.

        Of line 0 alone, where samples have not parted, have nothing of their own yet, or the
        receiver does not take their lines.
        """
        if parted is None:
            return [manager.length(seq)]
        own = [0 if sample is None else manager.length(sample) for sample in parted.seqs]
        if not self.parting and (not self.parts or max(own, default=0) <= parted.common):
            return [min(manager.length(seq), parted.common)]
        return [parted.common, *own]

    def aim(self, goals: Sequence[int]) -> None:
        """goal 0: of a sample that has ended, and need not go any further."""
        for line, goal in zip(self.lines, goals, strict=False):
            line.goal = max(line.goal, goal) if goal else line.acked

    def missing(self, ends: Sequence[int]) -> int:
        """Tokens that the receiver does not have, as far as is known."""
        lines = zip(self.lines, ends, strict=False)
        return sum(max(0, end - line.acked) for line, end in lines)

    def next_round(self, ends: Sequence[int], parted: Parted | None, block_size: int) -> bool:
        """A live move: sets the goals of the next round, when the last one has arrived.

        Whether the request is to be parked instead: less than a block is missing of each line, or
        what is missing has not become less.
        """
        lines = list(zip(self.lines, ends, strict=False))
        if self.asked_to_park or any(line.acked < line.goal for line, end in lines if end):
            return False
        goals = in_full(ends, parted, block_size)
        if len(ends) > 1 and not self.own:  # what the receiver has of the samples is not known yet
            self.aim(goals)
            return False
        remaining = self.missing(ends)
        block = any(end - line.acked >= block_size for line, end in lines)
        if not block or remaining >= self.remaining:  # a further round would not gain on it
            self.asked_to_park = True
            return True
        self.remaining = remaining
        self.aim(goals)
        return False


def in_full(ends: Sequence[int], parted: Parted | None, block_size: int) -> list[int]:
    """Of these ends, those of full blocks; but all that parted samples have in common."""
    full = [end // block_size * block_size for end in ends]
    return [ends[0], *full[1:]] if parted is not None and parted.seqs else full
