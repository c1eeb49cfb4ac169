"""Two loops that say how fast this machine is right now; they stand beside absolute figures."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Calibration:
    """An iteration of a plain Python loop; bytes read and written a second by a plain copy."""

    python_loop_ns: float
    copy_gb_per_s: float

    def __str__(self) -> str:
        return (
            f"calibration: Python loop {self.python_loop_ns:.0f} ns an iteration, "
            f"copy {self.copy_gb_per_s:.1f} GB/s"
        )


def calibrate() -> Calibration:
    """Takes about half a second and 512 MiB of memory."""
    return Calibration(statistics.median(python_loop() for _ in range(5)), _memory_copy())


def python_loop() -> float:
    """Nanoseconds an iteration."""
    start = time.perf_counter()
    total = 0
    for i in range(1_000_000):
        total += i
    return (time.perf_counter() - start) * 1e3


def _memory_copy() -> float:
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
