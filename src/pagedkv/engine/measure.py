"""How fast memory and disk are here, as medians of a few runs.

Decoding reads all weights and the whole context for every token, so its speed is bounded by the
bandwidth at which memory is read; blocks move between tiers at that at which it is copied.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from pagedkv.engine.machine import read_fields
from pagedkv.errors import ConfigError

_RUNS = 7
_SYNCS = 15
_SYNC_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bytes a second, by all threads of torch; `copy` counts the bytes copied, once.

    huge_pages: whether the kernel gave them when it was asked; else the two reads are alike.
    """

    read_small_pages: float
    read_huge_pages: float
    copy: float
    huge_pages: bool


@dataclass(frozen=True, slots=True)
class Disk:
    """sync_seconds: to write 64 KiB so that they outlive a loss of power. free: bytes."""

    sync_seconds: float
    free: int


def measure_bandwidths(
    num_bytes: int = 2**28, clock: Callable[[], float] = time.perf_counter
) -> Bandwidths:
    """Reads and copies buffers of `num_bytes`, which should be far larger than the caches.

    Takes twice as much memory. ValueError below a page.
    """
    if num_bytes < mmap.PAGESIZE:
        raise ValueError(f"num_bytes={num_bytes} must be a page of {mmap.PAGESIZE} at least")
    small = mapped_ones(num_bytes, "MADV_NOHUGEPAGE")
    read_small = num_bytes / _median(small.sum, clock)
    before = _in_huge_pages()
    huge = mapped_ones(num_bytes, "MADV_HUGEPAGE")
    got = _in_huge_pages() - before >= num_bytes // 2
    read_huge = num_bytes / _median(huge.sum, clock)
    copy = num_bytes / _median(lambda: small.copy_(huge), clock)
    return Bandwidths(read_small, read_huge, copy, got)


def measure_disk(folder: Path, clock: Callable[[], float] = time.perf_counter) -> Disk:
    """Writes to a temporary file in the folder. ConfigError if that cannot be."""
    data = bytes(_SYNC_BYTES)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:

            def write() -> None:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

            seconds = _median(write, clock, _SYNCS)
        status = os.statvfs(folder)
    except OSError as error:
        raise ConfigError(
            f"the folder {str(folder)!r} cannot be written: {error.strerror}: give another"
        ) from error
    return Disk(seconds, status.f_bavail * status.f_frsize)


def mapped_ones(num_bytes: int, advice: str) -> torch.Tensor:
    """float32 ones in pages of their own, for which the kernel has been given advice.

    The mapping is private: shared ones, Python's default, follow another rule for huge pages.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, advice):
        with suppress(OSError):  # a kernel that was built without huge pages
            memory.madvise(getattr(mmap, advice))
    # The tensor keeps the memory alive.
    return torch.frombuffer(memory, dtype=torch.float32).fill_(1.0)


def _in_huge_pages() -> int:
    """Bytes of this process that lie in huge pages now; 0 where the kernel does not say."""
    return 1024 * read_fields(Path("/proc/self/smaps_rollup")).get("AnonHugePages", 0)


def _median(run: Callable[[], object], clock: Callable[[], float], runs: int = _RUNS) -> float:
    """Median seconds of a run; the first one, which warms up, does not count."""
    run()
    seconds = []
    for _ in range(runs):
        start = clock()
        run()
        seconds.append(clock() - start)
    return statistics.median(seconds)
