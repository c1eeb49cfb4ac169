"""What does the sanitizer cost when it is on, and what when it is off?

Decode step and cached open are those of bench_cache.py, end to end is the embedded model: each runs
with the sanitizer and without in turn, and the ratio of the medians is printed. Off, a verb of the
manager pays for one wrapper, whose cost a call is printed. Nothing is asserted.
"""

from __future__ import annotations

import gc
import statistics
import time
import timeit
from types import SimpleNamespace

import numpy as np

from bench_cache import BLOCK, VOCABULARY, WARM_UP
from calibration import print_calibration
from pagedkv import LLM, SamplingParams
from pagedkv.bench.cache import decoding
from pagedkv.cache import BlockManager
from pagedkv.cache.sanitizer import watched

MODEL = "smollm2-135m-instruct"
ROUNDS = 3
BOTH = (False, True)  # plain, sanitized
Times = dict[bool, list[float]]


def decode_steps(steps: int = 500, num_seqs: int = 256) -> Times:
    """Seconds of each decode step."""
    rng = np.random.default_rng(1)
    managers = {sanitize: decoding(32_768, BLOCK, num_seqs, sanitize=sanitize) for sanitize in BOTH}
    ones, seconds = [1] * num_seqs, {sanitize: [] for sanitize in BOTH}
    for row in rng.integers(0, VOCABULARY, (WARM_UP + steps, num_seqs), dtype=np.int32).tolist():
        drawn = [[token] for token in row]
        for sanitize, (m, seqs) in managers.items():
            start = time.perf_counter()
            m.reserve(seqs, ones)
            m.commit(seqs, drawn)
            seconds[sanitize].append(time.perf_counter() - start)
    return {sanitize: times[WARM_UP:] for sanitize, times in seconds.items()}


def cached_opens(n: int = 100_000, runs: int = 31) -> Times:
    """Seconds of `open` for a fully cached prompt, an int32 array."""
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, n, dtype=np.int32)
    managers = {sanitize: BlockManager(8192, BLOCK, sanitize=sanitize) for sanitize in BOTH}
    for m in managers.values():
        seq = m.open(tokens)
        m.reserve([seq], [n])
        m.commit([seq], [tokens])
        m.close(seq)
    seconds: Times = {sanitize: [] for sanitize in BOTH}
    for _ in range(runs):
        for sanitize, m in managers.items():
            start = time.perf_counter()
            seq = m.open(tokens)
            seconds[sanitize].append(time.perf_counter() - start)
            m.close(seq)
    return seconds


def end_to_end(
    engines: dict[bool, LLM], count: int, prompt: int, output: int, prefix: int
) -> Times:
    """Seconds of `count` requests of `prompt` tokens, the first `prefix` of them cached."""
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    seconds: Times = {sanitize: [] for sanitize in BOTH}
    common = np.random.default_rng(2).integers(100, 40_000, prefix).tolist()
    for round_ in range(-1, ROUNDS):  # round -1 fills the caches
        rng = np.random.default_rng(100 + round_)
        prompts = [
            {"prompt_token_ids": common + rng.integers(100, 40_000, prompt - prefix).tolist()}
            for _ in range(count)
        ]
        for sanitize in sorted(engines, reverse=bool(round_ % 2)):
            start = time.perf_counter()
            engines[sanitize].generate(prompts, params)
            seconds[sanitize].append(time.perf_counter() - start)
    return {sanitize: times[1:] for sanitize, times in seconds.items()}


def wrapper() -> float:
    """Nanoseconds that `watched` adds to a call when there is no sanitizer."""

    def verb(self: object, seqs: list[int], counts: list[int]) -> None:
        pass

    manager, number = SimpleNamespace(sanitizer=None), 200_000
    calls = {False: verb, True: watched(verb)}
    seconds: Times = {on: [] for on in BOTH}
    for _ in range(7):
        for on, call in calls.items():
            timer = timeit.Timer("call(m, a, a)", globals={"call": call, "m": manager, "a": []})
            seconds[on].append(timer.timeit(number) / number)
    return (statistics.median(seconds[True]) - statistics.median(seconds[False])) * 1e9


def show(what: str, seconds: Times, bar: str) -> None:
    plain, watched_ = (statistics.median(seconds[sanitize]) for sanitize in BOTH)
    print(f"{what}: {watched_ / plain:.2f}x of {plain * 1e3:.2f} ms   [bar: {bar}]")


def main() -> None:
    print_calibration()
    print(f"off: {wrapper():.0f} ns a call of a verb")
    gc.collect()
    show("decode step of 256 sequences", decode_steps(), "3x")
    show("cached 100,000-token open", cached_opens(), "3x")
    engines = {
        sanitize: LLM(MODEL, dtype="float32", num_blocks=1024, sanitize=sanitize)
        for sanitize in BOTH
    }
    for what, load in {
        "8 requests, 100 in, 64 out": (8, 100, 64, 0),
        "1 request, 100 in, 64 out": (1, 100, 64, 0),
        "8 requests, 1,000 in, 960 of them cached, 16 out": (8, 1000, 16, 960),
        "2 requests, 1,500 in, 1 out": (2, 1500, 1, 0),
    }.items():
        show(what, end_to_end(engines, *load), "1.3x")


if __name__ == "__main__":
    main()
