"""Calls that a manager must refuse in the state it is in, with the error each one must raise."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from pagedkv.cache import BlockManager, OutOfSequences

if TYPE_CHECKING:
    from explorer import Sequence

WrongCall = tuple[type[Exception], partial[Any]]


def wrong_calls(m: BlockManager, sequences: list[Sequence]) -> Iterator[WrongCall]:
    """Misuse of all sequences that are open.

    A call that names one sequence rightly and another wrongly must leave both alone.
    """
    room, longest = m.max_seqs - len(sequences), m.max_blocks_per_seq * m.block_size
    idle = [s.seq for s in sequences if not s.reserved]
    busy = [s.seq for s in sequences if s.reserved]
    if not room:
        yield OutOfSequences, partial(m.open, [0])
    for seq, tokens, reserved, *_ in sequences:
        yield ValueError, partial(m.truncate, seq, len(tokens) + 1)
        if reserved:
            yield ValueError, partial(m.fork, seq)
            yield ValueError, partial(m.reserve, [*idle, seq], [1] * (len(idle) + 1))
            yield ValueError, partial(m.commit, [seq], [[0] * (reserved + 1)])
            yield ValueError, partial(m.commit, [seq, seq], [[], []])
            for other in idle:
                yield ValueError, partial(m.commit, [seq, other], [[0] * reserved, []])
        else:
            yield OutOfSequences, partial(m.fork, seq, room + 1)
            yield ValueError, partial(m.reserve, [seq], [longest - len(tokens) + 1])
            yield ValueError, partial(m.commit, [seq], [[]])
            yield ValueError, partial(m.cancel, [*busy, seq])
    closed = next(seq for seq in count(m.max_seqs) if seq not in idle and seq not in busy)
    yield KeyError, partial(m.reserve, [*idle, closed], [1] * (len(idle) + 1))
    yield KeyError, partial(m.commit, [*busy, closed], [[]] * (len(busy) + 1))
    yield KeyError, partial(m.cancel, [*busy, closed])
