"""The block manager alone, in a pool so full of cached blocks that every new block evicts one."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedkv.bench.rounds import fast
from pagedkv.cache import BlockManager, SeqId
from pagedkv.errors import ConfigError

_VOCABULARY = 49_152
_FILL = 4096  # tokens of a prompt that fills the pool
_SHORTEST, _LONGEST = 200, 300  # tokens of a sequence before the first step
_WARM_UP = 1  # rounds whose caches are cold


@dataclass(frozen=True, slots=True)
class CacheTimes:
    """Microseconds each, of a round of the fastest tenth.

    decode: `reserve` and `commit` of a token, a sequence. open: of a prompt that is cached but for
    its last token, the look-up included; close: of the same. fork: of a sequence, with the
    `reserve` and `commit` of the next token, for which the tail is copied.
    """

    decode_us: float
    open_us: float
    close_us: float
    fork_us: float
    cached_tokens: int  # of each open
    evicted_blocks: int  # by all that was measured


def measure_cache(
    num_seqs: int, num_blocks: int, block_size: int, *, rounds: int = 20, prompt_len: int = 1024
) -> CacheTimes:
    """A round has as many decode steps of all sequences as a block has slots, and as many opens
    and forks: every sequence gets one block in it, so all rounds do the same work.
    ConfigError if the pool is too small for them, or for a number below 1.
    """
    for name, value, least in (
        ("num_seqs", num_seqs, 1),
        ("num_blocks", num_blocks, 1),
        ("block_size", block_size, 1),
        ("rounds", rounds, 1),
        ("prompt_len", prompt_len, 2),
    ):
        if value < least:
            raise ConfigError(f"{name}={value}: give at least {least}")
    times = (_WARM_UP + rounds) * block_size
    longest = _LONGEST + times
    needed = num_seqs * _blocks(longest, block_size) + _blocks(prompt_len, block_size) + 1
    if needed > num_blocks:
        raise ConfigError(
            f"num_blocks={num_blocks}: {num_seqs} sequences of up to {longest} tokens and a prompt "
            f"of {prompt_len} take {needed}: give as many, or fewer sequences"
        )
    manager, seqs = decoding(
        num_blocks, block_size, num_seqs, longest=max(longest + 1, prompt_len, _FILL)
    )
    rng = np.random.default_rng(1)
    prompt = random_tokens(rng, prompt_len)
    manager.close(open_with(manager, prompt))
    evicted = manager.num_evicted_blocks
    gc.collect()
    decode = _decode(manager, seqs, rng, times)
    # Decode steps may have evicted the prompt.
    manager.close(open_with(manager, prompt))
    opens, closes, cached = _opens(manager, prompt, times)
    forks = _forks(manager, seqs, times)
    evicted = manager.num_evicted_blocks - evicted
    for seq in seqs:
        manager.close(seq)
    return CacheTimes(
        decode_us=_microseconds(decode, block_size) / num_seqs,
        open_us=_microseconds(opens, block_size),
        close_us=_microseconds(closes, block_size),
        fork_us=_microseconds(forks, block_size),
        cached_tokens=cached,
        evicted_blocks=evicted,
    )


def _decode(
    manager: BlockManager, seqs: list[SeqId], rng: np.random.Generator, times: int
) -> list[float]:
    ones, seconds = [1] * len(seqs), []
    for _ in range(times):
        drawn = random_tokens(rng, len(seqs))[:, None].tolist()
        start = time.perf_counter()
        manager.reserve(seqs, ones)
        manager.commit(seqs, drawn)
        seconds.append(time.perf_counter() - start)
    return seconds


def _opens(
    manager: BlockManager, prompt: npt.NDArray[np.int32], times: int
) -> tuple[list[float], list[float], int]:
    """Seconds of `open` and `close`, and the tokens that the last one found."""
    opens, closes, cached = [], [], 0
    for _ in range(times):
        start = time.perf_counter()
        seq = manager.open(prompt)
        opened = time.perf_counter()
        cached = manager.cached_tokens(seq)
        closing = time.perf_counter()
        manager.close(seq)
        opens.append(opened - start)
        closes.append(time.perf_counter() - closing)
    return opens, closes, cached


def _forks(manager: BlockManager, seqs: list[SeqId], times: int) -> list[float]:
    seconds = []
    for i in range(times):
        start = time.perf_counter()
        child = manager.fork(seqs[i % len(seqs)])
        manager.reserve(child, [1])
        manager.commit(child, [[0]])
        seconds.append(time.perf_counter() - start)
        manager.close(child[0])
    return seconds


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _microseconds(seconds: list[float], times: int) -> float:
    """Of one time, where a round has so many."""
    rounds = [sum(seconds[i : i + times]) for i in range(0, len(seconds), times)]
    return fast(rounds[_WARM_UP:]) / times * 1e6


def open_with(manager: BlockManager, tokens: npt.NDArray[np.int32]) -> SeqId:
    """A sequence of these tokens, committed."""
    seq = manager.open(tokens)
    rest = tokens[manager.cached_tokens(seq) :]
    manager.reserve([seq], [len(rest)])
    manager.commit([seq], [rest])
    return seq


def fill_pool(manager: BlockManager, rng: np.random.Generator, longest: int) -> None:
    """Makes every free block a cached one, by prompts of up to `longest` tokens."""
    while manager.num_free_blocks:
        length = min(manager.num_free_blocks * manager.block_size, longest, _FILL)
        manager.close(open_with(manager, random_tokens(rng, length)))


def random_tokens(rng: np.random.Generator, length: int) -> npt.NDArray[np.int32]:
    return rng.integers(0, _VOCABULARY, length, dtype=np.int32)


def decoding(
    num_blocks: int,
    block_size: int,
    num_seqs: int,
    *,
    longest: int = 8192,
    sanitize: bool = False,
) -> tuple[BlockManager, list[SeqId]]:
    """A full pool, and sequences of 200 to 300 tokens in it, which have room for `longest`.

    There is room for one more sequence.
    """
    rng = np.random.default_rng(0)
    manager = BlockManager(
        num_blocks,
        block_size,
        max_seqs=num_seqs + 1,
        max_blocks_per_seq=_blocks(longest, block_size),
        sanitize=sanitize,
    )
    fill_pool(manager, rng, longest)
    lengths = rng.integers(_SHORTEST, _LONGEST, num_seqs).tolist()
    return manager, [open_with(manager, random_tokens(rng, length)) for length in lengths]
