"""What a sender has of a request: its sequences, and how far each line has come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pagedkv.cache import BlockManager, SeqId
from pagedkv.cache.types import Int32


class Parted(NamedTuple):
    """Samples that have parted: `common` tokens are those of all of them.

    seqs: of each sample, in the order in which the move was started; None: it has ended.
    """

    common: int
    seqs: tuple[SeqId | None, ...]


class Piece(NamedTuple):
    """Tokens [start, stop) of a line: in `blocks` (int32 [k]), from the first slot on.

    tokens: int32 [stop - start].
    """

    start: int
    stop: int
    blocks: Int32
    tokens: Int32


@dataclass(slots=True)
class Outgoing:
    """A line at its sender. Of its tokens:

    [0, acked)       at the receiver
    [acked, sent)    under way
    [sent, goal)     to be sent, as far as the window allows
    """

    acked: int = 0
    sent: int = 0
    goal: int = 0

    def confirm(self, have: int) -> bool:
        """The receiver has so many. Whether that is news."""
        if have <= self.acked:
            return False
        self.acked, self.sent = have, max(self.sent, have)
        return True

    def again(self, first: int) -> None:
        """All from token `first` on is sent again."""
        self.sent = min(self.sent, first)

    def pieces(
        self, manager: BlockManager, seq: SeqId, end: int, most: int, room: int
    ) -> Iterator[Piece]:
        """Pieces of [sent, goal), as far as `end`: of `most` blocks each and `room` in all.

        They count as sent.
        """
        size, end = manager.block_size, min(self.goal, end)
        table = manager.block_table(seq)
        while self.sent < end and room > 0:
            first = self.sent // size
            stop = min((first + min(most, room)) * size, end)
            blocks: Int32 = table[first : -(-stop // size)].copy()
            room -= len(blocks)
            start, self.sent = first * size, stop
            tokens = manager.contents[blocks].reshape(-1)[: stop - start]
            yield Piece(start, stop, blocks, tokens)


def known_tokens(manager: BlockManager, seq: SeqId, start: int, stop: int) -> Int32:
    """Ids of the committed tokens [start, stop) of a sequence, int32."""
    size = manager.block_size
    first = start // size
    blocks = manager.block_table(seq)[first : -(-stop // size)]
    tokens: Int32 = manager.contents[blocks].reshape(-1)[start - first * size : stop - first * size]
    return tokens
