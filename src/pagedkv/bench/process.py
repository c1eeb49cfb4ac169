"""What this process has used: memory at its peak, and processors."""

from __future__ import annotations

import resource
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pagedkv.engine.machine import read_fields

_PROC = Path("/proc/self")


def reset_peak() -> None:
    """From now on the peak is that of what follows, where the system can do that (Linux)."""
    with suppress(OSError):
        (_PROC / "clear_refs").write_text("5")


def peak_memory() -> int:
    """Most bytes of this process that lay in memory at once, since `reset_peak` where it works."""
    high = read_fields(_PROC / "status").get("VmHWM")
    return 1024 * (high or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


@dataclass(slots=True)
class CoreMeter:
    """Processors that were busy with this process, on average since it was made."""

    _wall: float = field(default_factory=time.perf_counter)
    _cpu: float = field(default_factory=time.process_time)

    def cores(self) -> float:
        wall = time.perf_counter() - self._wall
        return (time.process_time() - self._cpu) / wall if wall > 0 else 0.0
