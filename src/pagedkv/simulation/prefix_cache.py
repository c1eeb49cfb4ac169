"""What share of a trace's prompt tokens a prefix cache of a given size would have found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedkv.cache import BlockManager
from pagedkv.errors import ConfigError
from pagedkv.simulation.trace import Trace

# One token stands for a block of the trace; this one, which no block has, leaves the lookup the
# token that is always left to compute.
_END = np.array([-1], np.int32)


@dataclass(frozen=True, slots=True)
class HitRate:
    """Counts over a trace. Only full blocks can be found."""

    requests: int
    prompt_tokens: int
    found_tokens: int
    too_large: int  # prompts of more full blocks than the pool has: missed, and not cached

    @property
    def token_hit_rate(self) -> float:
        return self.found_tokens / self.prompt_tokens


def hit_rate(
    trace: Trace, num_blocks: int, block_size: int | None = None, eviction: str = "slru"
) -> HitRate:
    """Runs the prompts of a trace, one after the other, through a BlockManager.

    num_blocks: of the trace's block size; 0: as many as the trace could ever fill.
    block_size: None, or the trace's own. eviction: as BlockManager has it.
    ConfigError: the trace has no block ids or other ones, or a setting cannot work.
    """
    if trace.block_ids is None or trace.block_size is None:
        raise ConfigError("the trace has no column of block ids, such as block512_ids")
    size = trace.block_size
    if block_size not in (None, size):
        raise ConfigError(
            f"block_size={block_size}: the trace's block ids are for blocks of {size}"
        )
    prompts = [
        ids[: tokens // size].astype(np.int32)
        for ids, tokens in zip(trace.block_ids, trace.prompt_tokens.tolist(), strict=True)
    ]
    if num_blocks < 0:
        raise ConfigError(f"num_blocks={num_blocks}: give at least 0 (0: without a limit)")
    blocks = num_blocks or max(1, len(np.unique(np.concatenate(prompts))))
    try:
        manager = BlockManager(
            blocks, 1, max_seqs=1, max_blocks_per_seq=blocks + 1, eviction=eviction
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    fitting = [ids for ids in prompts if len(ids) <= blocks]
    found = sum(_run(manager, ids) for ids in fitting)
    return HitRate(
        len(trace), int(trace.prompt_tokens.sum()), found * size, len(prompts) - len(fitting)
    )


def _run(manager: BlockManager, ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int:
    """One prompt, found as far as it is cached and computed for the rest. Returns blocks found."""
    seq = manager.open(np.concatenate([ids, _END]))
    found = manager.length(seq)
    rest = ids[found:]
    manager.reserve([seq], [len(rest)])
    manager.commit([seq], [rest])
    manager.close(seq)
    return found
