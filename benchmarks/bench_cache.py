"""What does block management cost a step, and a long cached prompt?

Decode step: `reserve` + `commit` of 256 sequences, prefix caching on, the pool full so that every
new block evicts one, tail phases random. Long prompt: `open` of a fully cached prompt of 100,000
tokens at block 16. Printed beside a calibration loop of the same run; nothing is asserted.
"""

from __future__ import annotations

import gc
import statistics
import time

import numpy as np

from calibration import print_calibration
from pagedkv.bench.cache import decoding
from pagedkv.cache import BlockManager

BLOCK = 16
VOCABULARY = 49_152
WARM_UP = 20  # steps whose caches are cold


def decode_steps(steps: int, num_seqs: int = 256) -> list[float]:
    """Seconds of each decode step."""
    m, seqs = decoding(32_768, BLOCK, num_seqs)
    rng = np.random.default_rng(1)
    new_tokens = rng.integers(0, VOCABULARY, (WARM_UP + steps, num_seqs), dtype=np.int32).tolist()
    ones = [1] * num_seqs
    seconds = []
    for row in new_tokens:
        drawn = [[token] for token in row]
        start = time.perf_counter()
        m.reserve(seqs, ones)
        m.commit(seqs, drawn)
        seconds.append(time.perf_counter() - start)
    m.check()
    return seconds[WARM_UP:]


def cached_open(n: int = 100_000, runs: int = 15) -> tuple[list[float], list[float]]:
    """Seconds of `open` for a fully cached prompt: tokens as an int32 array, and as a list."""
    rng = np.random.default_rng(1)
    m = BlockManager(8192, BLOCK)
    tokens = rng.integers(0, VOCABULARY, n, dtype=np.int32)
    seq = m.open(tokens)
    m.reserve([seq], [n])
    m.commit([seq], [tokens])
    m.close(seq)
    times: tuple[list[float], list[float]] = ([], [])
    for form, seconds in zip((tokens, tokens.tolist()), times, strict=True):
        for _ in range(runs):
            start = time.perf_counter()
            seq = m.open(form)
            seconds.append(time.perf_counter() - start)
            m.close(seq)
    return times


def main() -> None:
    print_calibration()
    gc.collect()
    steps = decode_steps(1000)
    mean = statistics.mean(steps)
    print(
        f"decode step of 256 sequences: mean {mean / 256 * 1e6:.2f} us a sequence "
        f"({mean * 1e6:.0f} us a step), median {statistics.median(steps) / 256 * 1e6:.2f}, "
        f"worst step {max(steps) / mean:.1f}x the mean   [bar: 1 us, 5x]"
    )
    as_array, as_list = cached_open()
    print(
        f"cached 100,000-token open: {statistics.median(as_array) * 1e3:.2f} ms from an array, "
        f"{statistics.median(as_list) * 1e3:.2f} ms from a list   [bar: 5 ms]"
    )


if __name__ == "__main__":
    main()
