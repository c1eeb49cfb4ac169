"""What does block management cost a step, and a long cached prompt?

Decode step: `reserve` + `commit` of 256 sequences, prefix caching on, the pool full so that every
new block evicts one, tail phases random. Long prompt: `open` of a fully cached prompt of 100,000
tokens at block 16. Printed beside a calibration loop of the same run; nothing is asserted.

Then the decode step as the number of sequences grows, and as the pool does, in CPU time: the work
for a sequence is to stay the same.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import numpy as np

from calibration import print_calibration
from pagedkv.bench.cache import decoding
from pagedkv.cache import BlockManager

BLOCK = 16
VOCABULARY = 49_152
WARM_UP = 20  # steps whose caches are cold


CURVE_STEPS = 64
SEQUENCES = (16, 64, 256, 1024, 4096)  # in a pool of CURVE_BLOCKS
CURVE_BLOCKS = 262_144
POOLS = (16_384, 65_536, 262_144, 1_000_000)  # with CURVE_SEQUENCES
CURVE_SEQUENCES = 256


def decode_steps(
    steps: int,
    num_seqs: int = 256,
    num_blocks: int = 32_768,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of each decode step."""
    m, seqs = decoding(num_blocks, BLOCK, num_seqs, longest=4096)
    rng = np.random.default_rng(1)
    new_tokens = rng.integers(0, VOCABULARY, (WARM_UP + steps, num_seqs), dtype=np.int32).tolist()
    ones = [1] * num_seqs
    seconds = []
    for row in new_tokens:
        drawn = [[token] for token in row]
        start = clock()
        m.reserve(seqs, ones)
        m.commit(seqs, drawn)
        seconds.append(clock() - start)
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


def show_curve() -> None:
    """CPU microseconds a sequence: mean of steps, which all give some sequences a new block."""
    points = [(n, CURVE_BLOCKS) for n in SEQUENCES] + [(CURVE_SEQUENCES, n) for n in POOLS]
    for num_seqs, num_blocks in points:
        gc.collect()
        seconds = decode_steps(CURVE_STEPS, num_seqs, num_blocks, time.thread_time)
        each = statistics.mean(seconds) / num_seqs
        print(
            f"{num_seqs:5} sequences in a pool of {num_blocks:9,} blocks: decode step "
            f"{each * 1e6:5.2f} us a sequence ({each * num_seqs * 1e6:.0f} us a step)"
        )


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
    show_curve()


if __name__ == "__main__":
    main()
