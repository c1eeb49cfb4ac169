"""A group that was moved here: each sample on a sequence of its own, found by its own tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedkv.cache import BlockManager
from pagedkv.scheduling.request import Output, Request
from pagedkv.scheduling.step import Int32


class Reopening(NamedTuple):
    """tokens: all that are known of each live sample. cached: of these, what the cache has.

    blocks: what they take beside the full blocks that are in use, those in common counted once.
    """

    tokens: list[Int32]
    cached: list[int]
    blocks: int


def reopening(manager: BlockManager, request: Request, found: int) -> Reopening | None:
    """None: less is computed when its samples go along their fork tree.

    found: tokens of what all have in common that the cache has. A group finds all that was moved
    here with it. What the samples have in common must be there to the last full block: they hold it
    once then, whatever they find of their own, and take as many blocks as along the tree. A group
    that is preempted here comes back along its tree, never through the index.
    """
    live = request.live
    moved_here = request.resumed and request.num_preemptions == 0
    if not moved_here or len(live) == 1 or not request.started or request.scores_prompt:
        return None
    size = manager.block_size
    shared = request.prompt_length + request.common_output(live)
    full = shared // size
    tokens = [_known(request, output) for output in live]
    matches = [manager.match(own, request.namespace, request.public) for own in tokens]
    cached = [match.cached_tokens for match in matches]
    if min(cached) < full * size:
        return None
    alone = sum(len(own) for own in tokens) - sum(cached)
    tree = shared - min(found, shared - 1) + sum(len(own) - shared for own in tokens)
    if alone >= tree:
        return None
    common = tokens[0][: full * size + 1]
    first = manager.match(common, request.namespace, min(request.public, len(common)))
    unused = first.demand - 1  # full blocks in common that nobody has in use
    blocks = sum(match.demand for match in matches) - (len(live) - 1) * unused
    return Reopening(tokens, cached, blocks)


def _known(request: Request, output: Output) -> Int32:
    return np.concatenate([request.prompt, np.array(output.tokens, np.int32)])
