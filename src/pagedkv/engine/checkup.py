"""Whether this machine is fit to serve: findings, each with its figures and a remedy.

Each check is given facts, or the root of a tree of /proc and /sys, and says what they mean.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pagedkv.attention.isa import ISA_VARIABLE
from pagedkv.engine.machine import (
    ROOT,
    THREADS_VARIABLE,
    cpu_quota,
    granted_threads,
    machine_memory,
    num_threads,
    read_fields,
)
from pagedkv.engine.measure import Bandwidths, Disk
from pagedkv.engine.memory import KV_SHARE, pool_blocks, show_bytes
from pagedkv.engine.processor import GIVEN_ON_REQUEST, huge_page_mode, read_processor
from pagedkv.errors import ConfigError

Figure = str | float | bool | None | Sequence[str]
# A disk that takes longer than this to store a block makes write-through slow.
_SLOW_SYNC = 0.02


@dataclass(frozen=True, slots=True)
class Finding:
    """verdict: "ok", "note" (it works, and could be better) or "wrong"."""

    topic: str
    verdict: Literal["ok", "note", "wrong"]
    text: str
    figures: Mapping[str, Figure] = field(default_factory=dict)


def check_processor(root: Path = ROOT) -> Finding:
    """What the processor offers to the kernels."""
    processor = read_processor(root)
    features = ", ".join(processor.features) or "none of the features that the kernels know"
    figures: dict[str, Figure] = {"name": processor.name, "features": processor.features}
    if processor.best_isa == "scalar" and "neon" not in processor.features:
        remedy = "no AVX2 with FMA: the scalar kernels run, slowly; use a newer processor"
        return Finding("processor", "note", f"{processor.name}: {features}; {remedy}", figures)
    return Finding("processor", "ok", f"{processor.name}: {features}", figures)


def check_kernels(
    attention: str,
    reason: str,
    linear: str,
    isas: Sequence[str],
    root: Path = ROOT,
    forced: str | None = None,
) -> Finding:
    """Which kernels were chosen, and whether the build has those that the processor could run.

    isas: code paths of the native extension that run here, slowest first; empty: it is not built.
    forced: the one that PAGEDKV_ISA asks for.
    """
    best = read_processor(root).best_isa
    figures: dict[str, Figure] = {
        "attention": attention,
        "linear": linear,
        "isas": isas,
        "forced": forced,
    }
    text = f"{reason}; linear layers {linear}"
    if not isas:
        return Finding("kernels", "note", f"{text}; reinstall with a C++20 compiler", figures)
    if best not in isas:
        remedy = f"the processor has {best}, this build does not: reinstall with a newer compiler"
        return Finding("kernels", "note", f"{text}; {remedy}", figures)
    if forced is not None and forced != isas[-1]:
        remedy = f"{ISA_VARIABLE} forces {forced}: unset it for {isas[-1]}"
        return Finding("kernels", "note", f"{text}; {remedy}", figures)
    return Finding("kernels", "ok", text, figures)


def check_openmp(files: Sequence[str]) -> Finding:
    """files: of the OpenMP runtimes that this process has loaded."""
    figures: dict[str, Figure] = {"files": files}
    if len(files) > 1:
        text = (
            f"{len(files)} runtimes are mixed, whose threads take the cores from each other: "
            f"{', '.join(files)}; install packages that share one, in an environment of their own"
        )
        return Finding("OpenMP", "wrong", text, figures)
    return Finding("OpenMP", "ok", files[0] if files else "no runtime is loaded", figures)


def check_threads(
    torch_threads: int,
    root: Path = ROOT,
    affinity: frozenset[int] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Finding:
    """Threads in force, beside what mask and quota grant. torch_threads: torch's own number."""
    if affinity is None:
        affinity = frozenset(os.sched_getaffinity(0))
    granted, quota = granted_threads(root, affinity), cpu_quota(root)
    try:
        threads = num_threads(root, affinity, environ)
    except ConfigError as error:
        return Finding("threads", "wrong", str(error))
    if THREADS_VARIABLE not in environ:
        threads = min(threads, torch_threads)
    figures: dict[str, Figure] = {
        "threads": threads,
        "affinity": len(affinity),
        "quota": quota,
        "granted": granted,
    }
    limit = "no CPU quota" if quota is None else f"a CPU quota of {quota:g}"
    text = f"{threads} in force; {len(affinity)} processors in the affinity mask, {limit}"
    if threads > granted:
        remedy = f"{THREADS_VARIABLE}={threads} is more than {granted}: unset it, or give less"
        return Finding("threads", "wrong", f"{text}; {remedy}", figures)
    if threads < granted and THREADS_VARIABLE not in environ:
        return Finding("threads", "note", f"{text}; OMP_NUM_THREADS may limit them", figures)
    return Finding("threads", "ok", text, figures)


def check_memory(root: Path = ROOT) -> Finding:
    """What the host and the control groups leave to this process."""
    try:
        memory = machine_memory(root)
    except ConfigError as error:
        return Finding("memory", "wrong", str(error))
    host = read_fields(root / "proc/meminfo")
    total = host["MemTotal"] * 1024
    by = "the host has" if memory.limit == total else "a control group grants"
    figures: dict[str, Figure] = {
        "limit": memory.limit,
        "available": memory.available,
        "host": total,
    }
    text = f"{show_bytes(memory.available)} available; {by} {show_bytes(memory.limit)}"
    if memory.limit != total:
        text += f" of {show_bytes(total)}"
    swapped = (host.get("SwapTotal", 0) - host.get("SwapFree", 0)) * 1024
    if swapped > memory.limit // 100:
        text += f"; {show_bytes(swapped)} are swapped out by the system: K/V there are slow"
        return Finding("memory", "note", text, figures)
    return Finding("memory", "ok", text, figures)


def check_huge_pages(root: Path = ROOT) -> Finding:
    """Whether the kernel gives huge pages to those that ask for them, as the pool does."""
    mode = huge_page_mode(root)
    figures: dict[str, Figure] = {"mode": mode}
    if mode in GIVEN_ON_REQUEST:
        return Finding("huge pages", "ok", f"{mode}: the pool gets them", figures)
    why = "this kernel has none" if mode is None else f"{mode}: nobody gets them"
    remedy = "write madvise to /sys/kernel/mm/transparent_hugepage/enabled"
    return Finding("huge pages", "note", f"{why}; {remedy}", figures)


def check_bandwidths(measured: Bandwidths) -> Finding:
    """Medians, for people."""
    figures: dict[str, Figure] = {
        "read_small_pages": measured.read_small_pages,
        "read_huge_pages": measured.read_huge_pages,
        "copy": measured.copy,
        "huge_pages": measured.huge_pages,
    }
    huge = "in huge pages" if measured.huge_pages else "where huge pages were asked for in vain"
    text = (
        f"{_rate(measured.read_small_pages)} read in small pages, "
        f"{_rate(measured.read_huge_pages)} {huge}, {_rate(measured.copy)} copied"
    )
    return Finding("bandwidth", "ok" if measured.huge_pages else "note", text, figures)


def check_disk(folder: Path, disk: Disk) -> Finding:
    """A folder for blocks that leave the pool."""
    figures: dict[str, Figure] = {
        "folder": str(folder),
        "sync_seconds": disk.sync_seconds,
        "free": disk.free,
    }
    text = (
        f"{folder}: {disk.sync_seconds * 1e3:.3g} ms to store 64 KiB with fsync, "
        f"{show_bytes(disk.free)} free"
    )
    if disk.sync_seconds > _SLOW_SYNC:
        return Finding("disk", "note", f"{text}; write-through would be slow", figures)
    return Finding("disk", "ok", text, figures)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What of a model decides what fits. weights: bytes, None if they are not known.

    block_bytes: of a block of `block_size` tokens. max_model_len: None if it is not known.
    """

    name: str
    dtype: str
    weights: int | None
    block_bytes: int
    block_size: int
    max_model_len: int | None


def check_fit(model: ModelSize, root: Path = ROOT) -> Finding:
    """The pool that the engine would make by default, and what it holds."""
    try:
        memory = machine_memory(root)
        weights = model.weights or 0
        if weights > memory.available:
            raise ConfigError(
                f"the weights take {show_bytes(weights)} and {show_bytes(memory.available)} are "
                "available: take a smaller model, or give more memory"
            )
        left = memory.available - weights
        blocks = pool_blocks(model.block_bytes, memory, kv_cache_memory=math.floor(left * KV_SHARE))
    except ConfigError as error:
        return Finding("model", "wrong", f"{model.name}, {model.dtype}: {error}")
    tokens = blocks * model.block_size
    context = min(tokens, model.max_model_len or tokens)
    concurrency = blocks // math.ceil(context / model.block_size)
    figures: dict[str, Figure] = {
        "name": model.name,
        "dtype": model.dtype,
        "weights": model.weights,
        "token_bytes": model.block_bytes // model.block_size,
        "blocks": blocks,
        "tokens": tokens,
        "longest_context": context,
        "concurrency": concurrency,
    }
    known = "weights not known" if model.weights is None else f"weights {show_bytes(weights)}"
    text = (
        f"{model.name}, {model.dtype}: {known}, {model.block_bytes // model.block_size:,} bytes "
        f"of K/V a token; {blocks:,} blocks of {model.block_size} in {KV_SHARE:.0%} of what is "
        f"left, {context:,} tokens x {concurrency} at a time"
    )
    return Finding("model", "ok", text, figures)


def check_packages(present: Mapping[str, bool], purposes: Mapping[str, str]) -> Finding:
    """Optional packages: which are there, and what the others would bring."""
    missing = [f"{name} ({purposes[name]})" for name, there in present.items() if not there]
    found = [name for name, there in present.items() if there]
    figures: dict[str, Figure] = dict(present)
    text = ", ".join(found) or "none of the optional ones"
    if missing:
        return Finding("packages", "note", f"{text}; missing: {', '.join(missing)}", figures)
    return Finding("packages", "ok", text, figures)


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"
