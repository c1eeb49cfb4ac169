"""What the processor is and can do, and the pages that its memory comes in.

Every path is below `root`, so that a test can lay out a machine as a tree of files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pagedkv.engine.machine import ROOT, read_text

# What the kernels ask for, and what Linux calls it: in "flags" of x86, in "Features" of ARM.
_FLAGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "avx2": ("avx2",),
        "fma": ("fma",),
        "avx512f": ("avx512f",),
        "avx512bw": ("avx512bw",),
        "avx512vl": ("avx512vl",),
        "avx512bf16": ("avx512_bf16",),
        "neon": ("asimd", "neon"),
        "bf16": ("bf16",),
    }
)
_AVX512 = ("avx512f", "avx512bw", "avx512vl")


@dataclass(frozen=True, slots=True)
class Processor:
    """features: those of `_FLAGS` that processor and operating system offer, in that order."""

    name: str
    features: tuple[str, ...]

    @property
    def best_isa(self) -> str:
        """The code path that a complete build would take here, for attention."""
        if {"fma", *_AVX512} <= set(self.features):
            return "avx512"
        return "avx2" if {"avx2", "fma"} <= set(self.features) else "scalar"


def read_processor(root: Path = ROOT) -> Processor:
    """The first processor in /proc/cpuinfo; "unknown", without features, where there is none."""
    text = read_text(root / "proc/cpuinfo")
    named = re.search(r"^(?:model name|Model|Hardware)\s*: *(.*)$", text, re.M)
    listed = re.search(r"^(?:flags|Features)\s*: *(.*)$", text, re.M)
    flags = set(listed[1].split()) if listed else set()
    return Processor(
        named[1].strip() if named else "unknown",
        tuple(feature for feature, names in _FLAGS.items() if flags & set(names)),
    )


# Modes of transparent huge pages in which who asks for them gets them.
GIVEN_ON_REQUEST = ("always", "madvise")


def huge_page_mode(root: Path = ROOT) -> str | None:
    """Transparent huge pages: "always", "madvise" or "never"; None: this kernel has none."""
    found = re.search(r"\[(\w+)\]", read_text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return found[1] if found else None
