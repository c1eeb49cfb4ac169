"""What this process may really use: memory and processors, by the host and by its control groups.

In a container the host's figures are far too large; the limits stand in the files of cgroup v1 or
v2. Every path is below `root`, so that a test can lay out a machine as a tree of files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pagedkv.errors import ConfigError

ROOT = Path("/")
THREADS_VARIABLE = "PAGEDKV_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Bytes: the most this process can ever have, and what of it nobody uses now."""

    limit: int
    available: int


def machine_memory(root: Path = ROOT) -> MachineMemory:
    """The smallest of the host's memory and the limits of all control groups around us.

    Page cache that the kernel can drop counts as available. A limit of "max" or one that is
    larger than the host (v1 writes 9223372036854771712 for none) limits nothing.
    Raises ConfigError when the host does not say how much memory it has.
    """
    host = read_fields(root / "proc/meminfo")
    if "MemTotal" not in host:
        raise ConfigError(
            f"{root / 'proc/meminfo'} does not give MemTotal, so the pool cannot be sized: "
            "mount /proc"
        )
    limit = host["MemTotal"] * 1024
    available = min(limit, host.get("MemAvailable", host["MemTotal"]) * 1024)
    for folder, names in _memory_groups(root):
        group_limit = _number(folder / names.limit)
        if group_limit is None or group_limit >= host["MemTotal"] * 1024:
            continue
        limit = min(limit, group_limit)
        used = _number(folder / names.usage) or 0
        droppable = read_fields(folder / "memory.stat").get(names.droppable, 0)
        available = min(available, max(0, group_limit - max(0, used - droppable)))
    return MachineMemory(limit, min(limit, available))


def num_threads(
    root: Path = ROOT,
    affinity: frozenset[int] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Threads to compute with: the affinity mask, or ceil(CPU quota) if that is less.

    $PAGEDKV_NUM_THREADS overrides both. Raises ConfigError if it is not a positive integer.
    """
    override = environ.get(THREADS_VARIABLE)
    if override is not None:
        if not override.isdecimal() or int(override) < 1:
            raise ConfigError(f"{THREADS_VARIABLE}={override!r} must be a positive integer")
        return int(override)
    return granted_threads(root, affinity)


def granted_threads(root: Path = ROOT, affinity: frozenset[int] | None = None) -> int:
    """Threads that the affinity mask and the CPU quotas around us have room for."""
    if affinity is None:
        affinity = frozenset(os.sched_getaffinity(0))
    return min([len(affinity), *map(math.ceil, _cpu_quotas(root))])


def cpu_quota(root: Path = ROOT) -> float | None:
    """Processors that our control groups grant; None: as many as there are."""
    return min(_cpu_quotas(root), default=None)


@dataclass(frozen=True, slots=True)
class _MemoryFiles:
    limit: str
    usage: str
    droppable: str  # field of memory.stat


_V2 = _MemoryFiles("memory.max", "memory.current", "inactive_file")
_V1 = _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _memory_groups(root: Path) -> Iterator[tuple[Path, _MemoryFiles]]:
    for folder in _groups(root, "memory"):
        yield folder, _V1
    for folder in _groups(root, ""):
        yield folder, _V2


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Processors that each control group around us grants; groups without a quota are left out."""
    for folder in _groups(root, ""):
        quota, _, period = read_text(folder / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            yield int(quota) / int(period)
    for folder in _groups(root, "cpu"):
        granted = _number(folder / "cpu.cfs_quota_us")  # -1: none
        every = _number(folder / "cpu.cfs_period_us")
        if granted is not None and granted > 0 and every:
            yield granted / every


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of our control group and of all around it; `controller` "" is the v2 hierarchy.

    Inside a container the path in /proc/self/cgroup may be the host's; the folders that are not
    there are of no harm, and the mount's top, which is the container's own group, comes last.
    """
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        mounts = {controller, controllers} if controller else {"", "unified"}
        inside = PurePosixPath(path.lstrip("/"))
        for mount in sorted(mounts):
            for part in (inside, *inside.parents):
                yield root / "sys/fs/cgroup" / mount / part


def read_text(path: Path) -> str:
    """Content of a file, "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = read_text(path)
    return int(text) if text.removeprefix("-").isdecimal() else None


def read_fields(path: Path) -> dict[str, int]:
    """Files of lines such as "name 12" or "name: 12 kB"."""
    fields = {}
    for line in read_text(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdecimal():
            fields[words[0].rstrip(":")] = int(words[1])
    return fields
