"""What a block size costs and saves, as far as that is arithmetic: no clock, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedkv.cache import BlockManager
from pagedkv.errors import ConfigError
from pagedkv.simulation.serve import prompt_tokens
from pagedkv.simulation.trace import Trace
from pagedkv.simulation.utilisation import utilisation

Int32 = npt.NDArray[np.int32]

TABLE_ENTRY_BYTES = 4  # an int32 block id
# Prompts that are looked up are cut off here, all together: names of single tokens are slow.
MAX_LOOKED_UP = 1_000_000


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """One block size on one set of requests."""

    tail_waste: float  # of reserved slots, those without a token; mean over slots and steps
    table_bytes: float  # of the block table, a request, when it ends
    copy_bytes: float  # of K and V, a copy-on-write of a prompt's tail; 0.0 if there is none
    hit_rate: float  # prompt tokens found in the prefix cache, partly shared blocks included
    full_block_hit_rate: float  # the same if only full blocks could be found


def tradeoffs(
    trace: Trace,
    prompts: Sequence[Int32],
    block_sizes: Sequence[int],
    token_bytes: int,
) -> dict[int, Tradeoff]:
    """By block size.

    prompts: token ids that are looked up and cached one after the other, in a pool that has room
    for all. token_bytes: of K and V of a token. ConfigError as of `utilisation`.
    """
    paged = utilisation(trace, block_sizes).paged
    tokens = trace.prompt_tokens + trace.output_tokens
    tradeoff = {}
    for size in block_sizes:
        found, full = _look_up(prompts, size)
        total = sum(len(prompt) for prompt in prompts)
        tradeoff[size] = Tradeoff(
            1 - paged[size],
            float((-(-tokens // size)).mean()) * TABLE_ENTRY_BYTES,
            _copied_slots(trace, size) * token_bytes,
            found / total,
            full / total,
        )
    return tradeoff


def prompts_of(trace: Trace) -> list[Int32]:
    """The first prompts of a trace, which share what its block ids say: MAX_LOOKED_UP tokens.

    ConfigError if the trace has no block ids, or its first prompt alone has more tokens.
    """
    if trace.block_ids is None:
        raise ConfigError("the trace has no column of block ids, such as block512_ids")
    ends = np.cumsum(trace.prompt_tokens)
    count = int(np.searchsorted(ends, MAX_LOOKED_UP, side="right"))
    if not count:
        raise ConfigError(f"the first prompt has more than {MAX_LOOKED_UP:,} tokens")
    return [prompt_tokens(trace, i, MAX_LOOKED_UP).astype(np.int32) for i in range(count)]


def shared_prefixes(num_requests: int = 200, num_prefixes: int = 8, seed: int = 0) -> list[Int32]:
    """Invented prompts: one of a few prefixes of 50 to 1500 tokens, and 1 to 400 of its own."""
    rng = np.random.default_rng(seed)
    prefixes = [_text(rng, int(rng.integers(50, 1501))) for _ in range(num_prefixes)]
    chosen = rng.integers(num_prefixes, size=num_requests)
    own = rng.integers(1, 401, num_requests)
    return [
        np.concatenate([prefixes[place], _text(rng, length)])
        for place, length in zip(chosen.tolist(), own.tolist(), strict=True)
    ]


def _text(rng: np.random.Generator, length: int) -> Int32:
    return rng.integers(0, 32_000, length, dtype=np.int32)


def _look_up(prompts: Sequence[Int32], size: int) -> tuple[int, int]:
    """Tokens found, and those of them in full blocks."""
    blocks = sum(-(-len(prompt) // size) for prompt in prompts) + 1
    longest = max(-(-len(prompt) // size) for prompt in prompts)
    manager = BlockManager(blocks, size, max_seqs=1, max_blocks_per_seq=longest)
    found = full = 0
    for prompt in prompts:
        seq = manager.open(prompt)
        cached = manager.length(seq)
        found, full = found + cached, full + cached // size * size
        manager.reserve([seq], [len(prompt) - cached])
        manager.commit([seq], [prompt[cached:]])
        manager.close(seq)
    return found, full


def _copied_slots(trace: Trace, size: int) -> float:
    """Mean slots of a copy, when each prompt is forked once and both go on."""
    lengths = trace.prompt_tokens.tolist()
    longest = -(-max(lengths) // size) + 1
    manager = BlockManager(2 * longest, size, False, max_seqs=2, max_blocks_per_seq=longest)
    copies = []
    for length in lengths:
        seq = manager.open([])
        manager.reserve([seq], [length])
        manager.commit([seq], [np.zeros(length, np.int32)])
        [fork] = manager.fork(seq)
        copies += manager.reserve([seq, fork], [1, 1]).copies[:, 2].tolist()
        manager.close(seq)
        manager.close(fork)
    return float(np.mean(copies)) if copies else 0.0
