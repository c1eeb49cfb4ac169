"""Faults reported against other engines that concern memory and threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedkv.engine.machine import MachineMemory, machine_memory, num_threads
from pagedkv.engine.memory import KV_SHARE, pool_blocks
from pagedkv.errors import ConfigError

GIB = 1024**3


def write(root: Path, name: str, content: object) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{content}\n")


def big_host(root: Path) -> None:
    write(
        root,
        "proc/meminfo",
        f"MemTotal: {692 * GIB // 1024} kB\nMemAvailable: {600 * GIB // 1024} kB",
    )


def test_oversized_pool_the_container_limit_counts_not_the_hosts_memory_v2(tmp_path: Path) -> None:
    """vllm PR#45086 and PR#55247: the pool was sized by the host and the container killed."""
    big_host(tmp_path)
    write(tmp_path, "proc/self/cgroup", "0::/pod/ctr")
    write(tmp_path, "sys/fs/cgroup/pod/memory.max", 150 * GIB)
    write(tmp_path, "sys/fs/cgroup/pod/ctr/memory.max", "max")
    memory = machine_memory(tmp_path)
    assert memory.limit == 150 * GIB
    assert pool_blocks(GIB, memory) == int(150 * KV_SHARE) - 1
    with pytest.raises(ConfigError, match="150"):
        pool_blocks(GIB, memory, num_blocks=150)


def test_oversized_pool_the_v1_sentinel_means_no_limit(tmp_path: Path) -> None:
    """vllm PR#45086 and PR#55247: "no limit" in cgroup v1 is a number."""
    big_host(tmp_path)
    write(tmp_path, "proc/self/cgroup", "7:memory:/")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    assert machine_memory(tmp_path).limit == 692 * GIB


def test_oversized_pool_missing_files_leave_the_host(tmp_path: Path) -> None:
    """vllm PR#45086 and PR#55247: fall-back when no control group can be read."""
    big_host(tmp_path)
    assert machine_memory(tmp_path).limit == 692 * GIB


def test_oversized_pool_weights_that_are_loaded_are_no_longer_available(tmp_path: Path) -> None:
    """vllm PR#45086 and PR#55247: model and pool together must stay below the limit."""
    big_host(tmp_path)
    write(tmp_path, "proc/self/cgroup", "0::/")
    write(tmp_path, "sys/fs/cgroup/memory.max", 150 * GIB)
    write(tmp_path, "sys/fs/cgroup/memory.current", 100 * GIB)
    with pytest.raises(ConfigError, match=r"50\.0 GiB of 150\.0 GiB are available"):
        pool_blocks(GIB, machine_memory(tmp_path), kv_cache_memory=60 * GIB)


def test_wrong_threads_mask_and_quota_count_and_the_override_wins(tmp_path: Path) -> None:
    """vllm#43240, #10971, #10556, #32651: one core, or more threads than the container has."""
    write(tmp_path, "proc/self/cgroup", "0::/")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "150000 100000")
    assert num_threads(tmp_path, frozenset({2, 3}), {}) == 2
    assert num_threads(tmp_path, frozenset(range(64)), {}) == 2
    assert num_threads(tmp_path, frozenset({2}), {}) == 1
    assert num_threads(tmp_path, frozenset({2, 3}), {"PAGEDKV_NUM_THREADS": "5"}) == 5


@pytest.mark.parametrize("block_bytes", [64, 1000, 46080, 737280])
def test_ignored_setting_the_memory_limit_is_obeyed(block_bytes: int) -> None:
    """vllm.cpp#357: the limit was ignored. One block less than fits: the null block."""
    limit = 64 * 1024**2
    blocks = pool_blocks(block_bytes, MachineMemory(GIB, GIB), kv_cache_memory=limit)
    assert blocks == limit // block_bytes - 1
    assert (blocks + 1) * block_bytes <= limit
