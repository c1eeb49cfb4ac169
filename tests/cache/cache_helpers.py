"""Short ways to put tokens into a cache, and to see that a refusal changed nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from pagedkv.cache import BlockManager, SeqId


def grow(m: BlockManager, seq: int, tokens: Sequence[int]) -> None:
    """Reserves and commits tokens at the end of a sequence."""
    m.reserve([seq], [len(tokens)])
    m.commit([seq], [list(tokens)])


def write(m: BlockManager, tokens: Sequence[int], **name: Any) -> SeqId:
    """Opens a sequence on what is cached and computes the rest."""
    tokens = list(tokens)
    seq = m.open(tokens, **name)
    grow(m, seq, tokens[m.length(seq) :])
    return seq


def remember(m: BlockManager, tokens: Sequence[int], **name: Any) -> int:
    """A whole request: computes tokens, closes, and returns how many were found cached."""
    seq = write(m, tokens, **name)
    found = m.cached_tokens(seq)
    m.close(seq)
    return found


def close_all(m: BlockManager, *seqs: int) -> None:
    for seq in seqs:
        m.close(seq)


@contextmanager
def refused(m: BlockManager, error: type[Exception], match: str) -> Iterator[None]:
    """The block raises `error` with `match` in its message and leaves the state byte-identical."""
    before = m.snapshot()
    with pytest.raises(error, match=match):
        yield
    assert m.snapshot() == before, "a refused call changed something"
