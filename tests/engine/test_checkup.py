"""What is said of a machine, laid out as a tree of /proc and /sys, and of what was measured."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from machine_trees import GIB, lay_out, meminfo

from pagedkv.engine import checkup
from pagedkv.engine.checkup import ModelSize
from pagedkv.engine.measure import Bandwidths, Disk, measure_bandwidths, measure_disk
from pagedkv.engine.processor import Processor, huge_page_mode, read_processor
from pagedkv.errors import ConfigError

AVX512 = "fpu sse2 avx2 fma avx512f avx512bw avx512vl avx512_bf16"
V1_NONE = 9223372036854771712


def cpuinfo(flags: str, name: str = "Some CPU") -> str:
    return (
        f"processor\t: 0\nmodel name\t: {name}\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags: none"
    )


def test_features_are_those_of_cpuinfo(tmp_path: Path) -> None:
    lay_out(tmp_path, {"proc/cpuinfo": cpuinfo(AVX512)})
    processor = read_processor(tmp_path)
    assert processor.name == "Some CPU"
    assert processor.features == ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512bf16")
    assert processor.best_isa == "avx512"


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        ("fpu sse2 avx", "scalar"),
        ("avx2", "scalar"),  # without fma
        ("avx2 fma", "avx2"),
        ("avx2 fma avx512f", "avx2"),  # without bw and vl
    ],
)
def test_an_incomplete_instruction_set_is_not_counted_on(
    tmp_path: Path, flags: str, isa: str
) -> None:
    lay_out(tmp_path, {"proc/cpuinfo": cpuinfo(flags)})
    assert read_processor(tmp_path).best_isa == isa
    finding = checkup.check_processor(tmp_path)
    assert finding.verdict == ("note" if isa == "scalar" else "ok")
    assert ("scalar kernels" in finding.text) == (isa == "scalar")


def test_an_arm_processor_is_read_too(tmp_path: Path) -> None:
    lay_out(tmp_path, {"proc/cpuinfo": "processor : 0\nFeatures : fp asimd bf16\n"})
    assert read_processor(tmp_path) == Processor("unknown", ("neon", "bf16"))
    assert checkup.check_processor(tmp_path).verdict == "ok"


def test_a_machine_that_says_nothing_is_a_note(tmp_path: Path) -> None:
    assert read_processor(tmp_path) == Processor("unknown", ())
    assert checkup.check_processor(tmp_path).verdict == "note"
    assert huge_page_mode(tmp_path) is None


@pytest.mark.parametrize(
    ("isas", "verdict", "part"),
    [
        (["scalar", "avx2", "avx512"], "ok", "linear layers native"),
        (["scalar", "avx2"], "note", "the processor has avx512, this build does not"),
        ([], "note", r"reinstall with a C\+\+20 compiler"),
    ],
)
def test_a_build_that_lacks_kernels_is_noted(
    tmp_path: Path, isas: list[str], verdict: str, part: str
) -> None:
    lay_out(tmp_path, {"proc/cpuinfo": cpuinfo(AVX512)})
    finding = checkup.check_kernels("native", "why", "native (avx512)", isas, tmp_path)
    assert finding.verdict == verdict
    assert part.replace("\\", "") in finding.text


def test_a_forced_instruction_set_is_noted(tmp_path: Path) -> None:
    lay_out(tmp_path, {"proc/cpuinfo": cpuinfo(AVX512)})
    isas = ["scalar", "avx2", "avx512"]
    for forced, verdict in ((None, "ok"), ("avx512", "ok"), ("avx2", "note")):
        finding = checkup.check_kernels("native", "why", "native", isas, tmp_path, forced)
        assert finding.verdict == verdict and finding.figures["forced"] == forced
        noted = "PAGEDKV_ISA forces avx2: unset it for avx512" in finding.text
        assert noted == (verdict == "note")


def test_two_openmp_runtimes_are_wrong() -> None:
    assert checkup.check_openmp(["/torch/libgomp.so.1"]).verdict == "ok"
    finding = checkup.check_openmp(["/a/libgomp.so.1", "/b/libiomp5.so"])
    assert finding.verdict == "wrong"
    assert "/a/libgomp.so.1, /b/libiomp5.so" in finding.text


MASK = frozenset({2, 3})


def test_threads_are_what_mask_and_quota_grant(tmp_path: Path) -> None:
    lay_out(
        tmp_path,
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"},
    )
    finding = checkup.check_threads(8, tmp_path, MASK, {})
    assert finding.verdict == "ok"
    assert finding.figures == {"threads": 2, "affinity": 2, "quota": 1.5, "granted": 2}
    over = checkup.check_threads(8, tmp_path, MASK, {"PAGEDKV_NUM_THREADS": "4"})
    assert over.verdict == "wrong"
    assert "PAGEDKV_NUM_THREADS=4 is more than 2" in over.text
    fewer = checkup.check_threads(8, tmp_path, MASK, {"PAGEDKV_NUM_THREADS": "1"})
    assert (fewer.verdict, fewer.figures["threads"]) == ("ok", 1)
    assert checkup.check_threads(1, tmp_path, MASK, {}).verdict == "note"
    wrong = checkup.check_threads(8, tmp_path, MASK, {"PAGEDKV_NUM_THREADS": "many"})
    assert wrong.verdict == "wrong" and "positive integer" in wrong.text


def test_a_quota_below_one_processor_is_one_thread(tmp_path: Path) -> None:
    lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/job",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": 50_000,
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": 100_000,
        },
    )
    assert checkup.check_threads(8, tmp_path, MASK, {}).figures["threads"] == 1


def container(root: Path, limit: object = 150 * GIB) -> Path:
    """A host of 692 GiB, in which a control group of cgroup v2 grants less."""
    return lay_out(
        root,
        {
            "proc/meminfo": meminfo(692 * GIB, 600 * GIB),
            "proc/self/cgroup": "0::/pod/job",
            "sys/fs/cgroup/pod/memory.max": limit,
            "sys/fs/cgroup/pod/job/memory.max": "max",
            "sys/fs/cgroup/pod/memory.current": 0,
        },
    )


def test_the_memory_of_a_container_is_its_limit(tmp_path: Path) -> None:
    finding = checkup.check_memory(container(tmp_path))
    assert finding.verdict == "ok"
    assert finding.figures["limit"] == finding.figures["available"] == 150 * GIB
    assert "a control group grants 150.0 GiB of 692.0 GiB" in finding.text


def test_the_sentinel_of_v1_limits_nothing(tmp_path: Path) -> None:
    lay_out(
        tmp_path,
        {
            "proc/meminfo": meminfo(8 * GIB, 6 * GIB),
            "proc/self/cgroup": "9:memory:/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_NONE,
        },
    )
    finding = checkup.check_memory(tmp_path)
    assert "6.0 GiB available; the host has 8.0 GiB" in finding.text


def test_memory_that_nobody_tells_is_wrong(tmp_path: Path) -> None:
    assert checkup.check_memory(tmp_path).verdict == "wrong"


def test_swapped_out_memory_is_noted(tmp_path: Path) -> None:
    swap = f"\nSwapTotal: {2 * GIB // 1024} kB\nSwapFree: {GIB // 1024} kB"
    lay_out(tmp_path, {"proc/meminfo": meminfo(8 * GIB, 6 * GIB) + swap})
    finding = checkup.check_memory(tmp_path)
    assert finding.verdict == "note" and "1.0 GiB are swapped out" in finding.text


@pytest.mark.parametrize(
    ("content", "verdict"),
    [
        ("always [madvise] never", "ok"),
        ("[always] madvise never", "ok"),
        ("always madvise [never]", "note"),
        ("", "note"),
    ],
)
def test_huge_pages(tmp_path: Path, content: str, verdict: str) -> None:
    lay_out(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": content})
    assert checkup.check_huge_pages(tmp_path).verdict == verdict


def size(weights: int | None, block_bytes: int = 2**20) -> ModelSize:
    return ModelSize("m", "bfloat16", weights, block_bytes, 16, 4096)


def test_what_fits_is_reckoned_from_the_limit_of_the_container(tmp_path: Path) -> None:
    finding = checkup.check_fit(size(50 * GIB), container(tmp_path))
    assert finding.verdict == "ok"
    blocks = int(100 * GIB * 0.4) // 2**20 - 1
    assert finding.figures["blocks"] == blocks
    assert finding.figures["longest_context"] == 4096
    assert finding.figures["concurrency"] == blocks // 256
    assert finding.figures["token_bytes"] == 2**16


def test_a_model_that_does_not_fit_is_wrong(tmp_path: Path) -> None:
    finding = checkup.check_fit(size(151 * GIB), container(tmp_path))
    assert finding.verdict == "wrong"
    assert "the weights take 151.0 GiB and 150.0 GiB are available" in finding.text
    no_block = checkup.check_fit(size(149 * GIB, block_bytes=GIB), container(tmp_path))
    assert no_block.verdict == "wrong" and "hold no pool" in no_block.text


def test_a_short_pool_bounds_the_context(tmp_path: Path) -> None:
    finding = checkup.check_fit(size(None, block_bytes=GIB), container(tmp_path))
    assert finding.figures["longest_context"] == finding.figures["tokens"] == 16 * 59
    assert finding.figures["concurrency"] == 1
    assert "weights not known" in finding.text


def test_missing_packages_are_named_with_what_they_bring() -> None:
    finding = checkup.check_packages({"a": True, "b": False}, {"a": "x", "b": "pagedkv top"})
    assert finding.verdict == "note"
    assert finding.text == "a; missing: b (pagedkv top)"
    assert checkup.check_packages({"a": True}, {"a": "x"}).verdict == "ok"


def ticking(seconds: list[float]) -> object:
    """A clock on which the runs take these seconds, one after the other."""
    times = itertools.accumulate(x for s in seconds for x in (0.0, s))
    return lambda: next(times)


def test_bandwidths_are_medians() -> None:
    small, huge, copy = [1.0, 9, 1, 2, 2, 3, 2], [1.0] * 7, [4.0] * 7
    measured = measure_bandwidths(2**20, ticking(small + huge + copy))
    assert measured.read_small_pages == 2**20 / 2
    assert measured.read_huge_pages == 2**20
    assert measured.copy == 2**18


def test_bandwidths_need_a_page() -> None:
    with pytest.raises(ValueError, match="page"):
        measure_bandwidths(100)


def test_huge_pages_that_were_refused_are_noted() -> None:
    assert checkup.check_bandwidths(Bandwidths(1e9, 2e9, 3e9, True)).verdict == "ok"
    finding = checkup.check_bandwidths(Bandwidths(1e9, 1e9, 3e9, False))
    assert finding.verdict == "note" and "in vain" in finding.text


def test_a_disk_is_measured_where_it_is(tmp_path: Path) -> None:
    disk = measure_disk(tmp_path, ticking([0.5] * 15))
    assert disk.sync_seconds == 0.5 and disk.free > 0
    assert not list(tmp_path.iterdir())
    assert checkup.check_disk(tmp_path, disk).verdict == "note"
    assert checkup.check_disk(tmp_path, Disk(0.001, GIB)).verdict == "ok"
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        measure_disk(tmp_path / "nowhere")
