"""Decoding alone, by batch and by context, beside llama.cpp's own batched benchmark: no server."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pagedkv.engine.machine import granted_threads
from pagedkv.models.embedded import EMBEDDED_MODEL
from peers.catalogue import OURS, Place, absent
from peers.compare import SETTLE_SECONDS
from peers.engines import EngineProcess, Setting
from peers.tables import columns
from peers.workloads import Workload, marked

OUTPUT = 48  # decode steps of a measurement
POINTS = (  # batch, context
    *((batch, 128) for batch in (1, 2, 4, 8, 16, 32, 64)),
    *((batch, context) for batch in (1, 8) for context in (256, 512, 1024, 2048, 4096)),
)
KV_BYTES = 2**31
ROUND = 256  # the context of a sequence is a multiple of it, as in llama.cpp itself


def print_curves(place: Place, rounds: int, file: Path | None, say: Callable[[str], None]) -> None:
    """Both in turn at every point, `rounds` times after a first one that does not count."""
    program = place.llama_program("llama-batched-bench")
    lacking = absent("llama.cpp", program, place.gguf)
    options = {"model": EMBEDDED_MODEL, "dtype": place.dtype, "kv_bytes": KV_BYTES}
    module = "peers.adapters.pagedkv_decode"
    setting = Setting(OURS, "decoding alone", module, sys.executable, options)
    ours: dict[tuple[int, int], list[float]] = {point: [] for point in POINTS}
    theirs: dict[tuple[int, int], list[float]] = {point: [] for point in POINTS}
    with EngineProcess(setting) as engine:
        for turn in range(rounds + 1):
            for number, (batch, context) in enumerate(POINTS):
                prompts = tuple(([i + j for j in range(context)], OUTPUT) for i in range(batch))
                workload = Workload("decode", f"batch {batch}, context {context}", prompts)
                time.sleep(SETTLE_SECONDS)
                answer = engine.run("decode", marked(workload, turn * len(POINTS) + number))
                mine, other = batch * OUTPUT / answer["seconds"], None
                if not lacking:
                    time.sleep(SETTLE_SECONDS)
                    other = batched_bench(program, place, batch, context)
                say(f"round {turn} {workload.title}: {mine:.0f} tokens/s, llama.cpp {other}")
                if turn:
                    ours[batch, context].append(mine)
                    if other is not None:
                        theirs[batch, context].append(other)
    rows = [["batch", "context", f"{OURS}, tokens/s", "llama.cpp, tokens/s", "ratio", "step, ms"]]
    for (batch, context), speeds in ours.items():
        others = theirs[batch, context]
        ratios = [mine / other for mine, other in zip(speeds, others, strict=False)]
        middle = statistics.median(speeds)
        rows.append(
            [
                str(batch),
                str(context),
                f"{middle:.0f}",
                f"{statistics.median(others):.0f}" if others else "-",
                f"{statistics.median(ratios):.2f}" if others else "-",
                f"{batch / middle * 1e3:.1f}",
            ]
        )
    print(f"\ndecoding, {place.dtype}, {OUTPUT} tokens a sequence, medians of {rounds} rounds\n")
    print("\n".join(columns(rows)))
    for lack in lacking:
        print(f"missing: {lack.what}: {lack.remedy}")
    if file is not None:
        points = [
            {"batch": b, "context": c, OURS: ours[b, c], "llama.cpp": theirs[b, c]} for b, c in ours
        ]
        file.write_text(json.dumps({"dtype": place.dtype, "points": points}, indent=1) + "\n")


def batched_bench(program: Path, place: Place, batch: int, context: int) -> float:
    """Decoded tokens a second, as llama.cpp's benchmark itself says."""
    each, threads = -(-(context + OUTPUT) // ROUND) * ROUND, str(granted_threads())
    kind = "f16" if place.half else "f32"
    command = [str(program), "-m", str(place.gguf), "-t", threads, "-tb", threads]
    command += ["-npp", str(context), "-ntg", str(OUTPUT), "-npl", str(batch)]
    command += ["-c", str(batch * each), "-ctk", kind, "-ctv", kind, "--output-format", "jsonl"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return float(json.loads(line)["speed_tg"])
