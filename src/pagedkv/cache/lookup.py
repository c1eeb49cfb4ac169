"""Finding the cached prefix of a prompt, and opening a sequence on it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedkv.cache.index import ROOT, Frames, make_frames
from pagedkv.cache.state import State
from pagedkv.cache.types import Int32, Match, Tokens, token_array, whole


class Query(NamedTuple):
    """A prompt and everything its names depend on."""

    tokens: Int32
    namespace: str | bytes | None
    public: int
    extra: bytes | None
    frames: Frames


class Hits(NamedTuple):
    """Cached full blocks in order, a partly matching block or ROOT, and the tokens they hold."""

    full: list[int]
    tail: int
    cached_tokens: int


def read_query(
    tokens: Tokens, namespace: str | bytes | None, public: int, extra: bytes | None
) -> Query:
    """Checks what a caller gave. ValueError names the value."""
    array = token_array(tokens)
    if not 0 <= whole(public, "public") <= len(array):
        raise ValueError(f"public={public} must be from 0 to the {len(array)} tokens given")
    return Query(array, namespace, public, extra, make_frames(namespace, extra))


def look_up(state: State, query: Query) -> Hits:
    """The longest cached prefix that leaves at least one token to compute."""
    tokens, frames, block_size = query.tokens, query.frames, state.block_size
    if not state.prefix_caching or len(tokens) < 2:
        return Hits([], ROOT, 0)
    most, public_blocks = len(tokens) - 1, query.public // block_size
    full = state.index.full_hits(tokens, frames, public_blocks, most // block_size)
    start = len(full) * block_size
    frame = frames.public if len(full) < public_blocks else frames.private
    rest = tokens[start : min(start + block_size, most)]
    if not len(rest):
        return Hits(full, ROOT, start)
    tail, common = state.index.partial_hit(full[-1] if full else ROOT, frame, rest)
    return Hits(full, tail, start + common)


def match(state: State, query: Query) -> Match:
    """What `open_row` would find, and the blocks the whole prompt takes from free and cached."""
    pool, hits = state.pool, look_up(state, query)
    used = (pool.counts[hits.full] > 0) | (pool.leases[hits.full] > 0)
    blocks = -(-len(query.tokens) // state.block_size)
    return Match(hits.cached_tokens, blocks - int(used.sum()))


def open_row(state: State, query: Query) -> int:
    """Takes a row of the block table and holds the hits. Errors as `BlockManager.open`."""
    table = state.table
    if len(query.tokens) > table.width * state.block_size:
        raise ValueError(
            f"{len(query.tokens)} tokens do not fit in max_blocks_per_seq={table.width} "
            f"blocks of {state.block_size}"
        )
    table.need(1)
    hits = look_up(state, query)
    blocks = np.array(hits.full if hits.tail == ROOT else [*hits.full, hits.tail], np.int32)
    row = table.take(query.namespace, query.extra, query.frames, query.public)
    state.pool.change(blocks, +1)
    state.pool.use_again(blocks)
    table.write(np.full(len(blocks), row), np.arange(len(blocks)), blocks)
    table.lengths[row] = table.found[row] = hits.cached_tokens
    return row
