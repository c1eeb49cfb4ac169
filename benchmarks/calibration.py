"""Two loops that say how fast this machine is right now; printed beside every absolute figure."""

from __future__ import annotations

import statistics
import time

import numpy as np


def python_loop() -> float:
    """Nanoseconds an iteration of a plain Python loop."""
    start = time.perf_counter()
    total = 0
    for i in range(1_000_000):
        total += i
    return (time.perf_counter() - start) * 1e3


def memory_copy() -> float:
    """GB/s (read + write) of copying 256 MiB."""
    source = np.ones(1 << 25)
    target = np.empty_like(source)
    np.copyto(target, source)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(seconds) / 1e9


def print_calibration() -> None:
    loop = statistics.median(python_loop() for _ in range(5))
    print(f"calibration: Python loop {loop:.0f} ns an iteration, copy {memory_copy():.1f} GB/s")
