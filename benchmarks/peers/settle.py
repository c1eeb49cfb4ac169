"""Touches most of the memory that is free, once: `python -m peers.settle`.

In a virtual machine the host backs a page when it is touched for the first time since the start,
which takes tens of times as long as a fault otherwise. Without this an engine that takes memory as
it goes would pay for it in its measured runs, and one that took all of it at its start would not.
In a process of its own, whose end gives the memory back.
"""

from __future__ import annotations

import mmap

import numpy as np

from pagedkv.engine.machine import machine_memory

SHARE = 0.7  # of what is available
PAGE = 4096


def main() -> None:
    size = int(machine_memory().available * SHARE)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, np.uint8)[::PAGE] = 1
    print(f"touched {size / 2**30:.1f} GiB of memory, so that nobody is the first to")


if __name__ == "__main__":
    main()
