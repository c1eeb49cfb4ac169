"""Limits of memory and processors, read from a fake tree of /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest
from machine_trees import GIB, lay_out, meminfo

from pagedkv.engine.machine import machine_memory, num_threads
from pagedkv.errors import ConfigError

V1_NONE = 9223372036854771712


def test_without_control_groups_the_hosts_figures_hold(tmp_path: Path) -> None:
    memory = machine_memory(lay_out(tmp_path, {"proc/meminfo": meminfo(8 * GIB, 5 * GIB)}))
    assert (memory.limit, memory.available) == (8 * GIB, 5 * GIB)


def test_old_kernel_without_available_memory(tmp_path: Path) -> None:
    memory = machine_memory(lay_out(tmp_path, {"proc/meminfo": meminfo(8 * GIB)}))
    assert (memory.limit, memory.available) == (8 * GIB, 8 * GIB)


def test_unknown_host_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MemTotal"):
        machine_memory(tmp_path)


@pytest.mark.parametrize("inside", ["/", "/job/task", "/gone/on/the/host"])
def test_v2_limit_of_the_mount_counts_wherever_we_are(tmp_path: Path, inside: str) -> None:
    lay_out(
        tmp_path,
        {
            "proc/meminfo": meminfo(64 * GIB, 60 * GIB),
            "proc/self/cgroup": f"0::{inside}",
            "sys/fs/cgroup/memory.max": 4 * GIB,
            "sys/fs/cgroup/memory.current": 3 * GIB,
            "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {2 * GIB}\nactive_file 7",
        },
    )
    memory = machine_memory(tmp_path)
    assert (memory.limit, memory.available) == (4 * GIB, 3 * GIB)  # 4 - (3 used - 2 droppable)


@pytest.mark.parametrize(("tight", "loose"), [("a", "a/b/c"), ("a/b/c", "a")])
def test_smallest_limit_of_nested_groups(tmp_path: Path, tight: str, loose: str) -> None:
    lay_out(
        tmp_path,
        {
            "proc/meminfo": meminfo(64 * GIB, 60 * GIB),
            "proc/self/cgroup": "0::/a/b/c",
            "sys/fs/cgroup/memory.max": "max",
            f"sys/fs/cgroup/{tight}/memory.max": 6 * GIB,
            f"sys/fs/cgroup/{tight}/memory.current": 5 * GIB,
            "sys/fs/cgroup/a/b/memory.max": "max",
            f"sys/fs/cgroup/{loose}/memory.max": 16 * GIB,
            f"sys/fs/cgroup/{loose}/memory.current": 1 * GIB,
            "sys/fs/cgroup/other/memory.max": 1,
        },
    )
    memory = machine_memory(tmp_path)
    assert (memory.limit, memory.available) == (6 * GIB, 1 * GIB)


def test_v1_limit_of_a_nested_group_and_the_sentinel(tmp_path: Path) -> None:
    lay_out(
        tmp_path,
        {
            "proc/meminfo": meminfo(64 * GIB, 60 * GIB),
            "proc/self/cgroup": "4:memory:/box/7\n2:cpu,cpuacct:/\n0::/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_NONE,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 50 * GIB,
            "sys/fs/cgroup/memory/box/7/memory.limit_in_bytes": 2 * GIB,
            "sys/fs/cgroup/memory/box/7/memory.usage_in_bytes": GIB,
            "sys/fs/cgroup/memory/box/7/memory.stat": f"total_inactive_file {GIB // 2}",
        },
    )
    memory = machine_memory(tmp_path)
    assert (memory.limit, memory.available) == (2 * GIB, 3 * GIB // 2)


def test_host_can_have_less_left_than_the_group_allows(tmp_path: Path) -> None:
    lay_out(
        tmp_path,
        {
            "proc/meminfo": meminfo(64 * GIB, 1 * GIB),
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": 8 * GIB,
            "sys/fs/cgroup/memory.current": 0,
        },
    )
    memory = machine_memory(tmp_path)
    assert (memory.limit, memory.available) == (8 * GIB, 1 * GIB)


def test_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    lay_out(
        tmp_path,
        {
            "proc/meminfo": meminfo(64 * GIB, 60 * GIB),
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": 2 * GIB,
            "sys/fs/cgroup/memory.current": 3 * GIB,
        },
    )
    assert machine_memory(tmp_path).available == 0


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({}, 4),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 4),
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
        ({"sys/fs/cgroup/cpu.max": "20000 100000"}, 1),
        ({"sys/fs/cgroup/cpu.max": "900000 100000"}, 4),
        ({"sys/fs/cgroup/a/cpu.max": "300000 100000", "sys/fs/cgroup/cpu.max": "max 1"}, 3),
    ],
)
def test_threads_follow_the_v2_quota(
    tmp_path: Path, files: dict[str, object], threads: int
) -> None:
    lay_out(tmp_path, {"proc/self/cgroup": "0::/a", **files})
    assert num_threads(tmp_path, frozenset({0, 1, 2, 3}), {}) == threads


@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
@pytest.mark.parametrize(("quota", "threads"), [(-1, 4), (150000, 2), (1000, 1)])
def test_threads_follow_the_v1_quota(tmp_path: Path, folder: str, quota: int, threads: int) -> None:
    lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "2:cpu,cpuacct:/x",
            f"sys/fs/cgroup/{folder}/x/cpu.cfs_quota_us": quota,
            f"sys/fs/cgroup/{folder}/x/cpu.cfs_period_us": 100000,
        },
    )
    assert num_threads(tmp_path, frozenset({0, 1, 2, 3}), {}) == threads


@pytest.mark.parametrize("bad", ["0", "-2", "many", "", "1.5"])
def test_bad_override_is_named(tmp_path: Path, bad: str) -> None:
    with pytest.raises(ConfigError, match="PAGEDKV_NUM_THREADS"):
        num_threads(tmp_path, frozenset({0}), {"PAGEDKV_NUM_THREADS": bad})


def test_this_machine_can_be_read() -> None:
    memory = machine_memory()
    assert 0 < memory.available <= memory.limit
    assert num_threads(environ={}) >= 1
