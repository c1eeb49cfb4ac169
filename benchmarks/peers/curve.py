"""Decoding alone, by batch and by context, beside llama.cpp's own batched benchmark: no server."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pagedkv.engine.machine import granted_threads
from pagedkv.models.embedded import EMBEDDED_MODEL
from peers.catalogue import OURS, Place, absent
from peers.compare import SETTLE_SECONDS
from peers.engines import EngineProcess, Setting
from peers.tables import columns
from peers.workloads import Workload, marked

Point = tuple[int, int]  # batch, context
Speeds = tuple[list[float], list[float]]  # tokens a second, one a round: ours, llama.cpp's

OUTPUT = 48  # decode steps of a measurement
POINTS: tuple[Point, ...] = (
    *((batch, 128) for batch in (1, 2, 4, 8, 16, 32, 64)),
    *((batch, context) for batch in (1, 8) for context in (256, 512, 1024, 2048, 4096)),
)
KV_BYTES = 2**31
ROUND = 256  # the context of a sequence is a multiple of it, as in llama.cpp itself


def print_curves(place: Place, rounds: int, file: Path | None, say: Callable[[str], None]) -> None:
    """Both in turn at every point, `rounds` times after a first one that does not count."""
    program = place.llama_program("llama-batched-bench")
    missing = absent(place, "llama.cpp", program, place.gguf)
    options = {"model": EMBEDDED_MODEL, "dtype": place.dtype, "kv_bytes": KV_BYTES}
    module = "peers.adapters.pagedkv_decode"
    setting = Setting(OURS, "decoding alone", module, sys.executable, options)
    curve: dict[Point, Speeds] = {point: ([], []) for point in POINTS}
    with EngineProcess(setting) as engine:
        for turn in range(rounds + 1):
            for number, point in enumerate(POINTS):
                time.sleep(SETTLE_SECONDS)
                found = [decode_rate(engine, *point, run=turn * len(POINTS) + number)]
                if not missing:
                    time.sleep(SETTLE_SECONDS)
                    found.append(batched_bench(program, place, *point))
                shown = ", ".join(f"{rate:.0f}" for rate in found)
                say(f"round {turn} batch {point[0]}, context {point[1]}: {shown} tokens/s")
                if turn:
                    for rates, rate in zip(curve[point], found, strict=False):
                        rates.append(rate)
    print(f"\ndecoding, {place.dtype}, {OUTPUT} tokens a sequence, medians of {rounds} rounds\n")
    print("\n".join(curve_table(curve)))
    for lack in missing:
        print(f"missing: {lack.what}: {lack.remedy}")
    if file is not None:
        points = [
            {"batch": batch, "context": context, OURS: ours, "llama.cpp": theirs}
            for (batch, context), (ours, theirs) in curve.items()
        ]
        file.write_text(json.dumps({"dtype": place.dtype, "points": points}, indent=1) + "\n")


def curve_table(curve: Mapping[Point, Speeds]) -> list[str]:
    """Medians over the rounds; the ratio is one within each round."""
    rows = [["batch", "context", f"{OURS}, tokens/s", "llama.cpp, tokens/s", "ratio", "step, ms"]]
    for (batch, context), (ours, theirs) in curve.items():
        middle = statistics.median(ours)
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=False)]
        rows.append(
            [
                str(batch),
                str(context),
                f"{middle:.0f}",
                f"{statistics.median(theirs):.0f}" if theirs else "-",
                f"{statistics.median(ratios):.2f}" if ratios else "-",
                f"{batch / middle * 1e3:.1f}",
            ]
        )
    return columns(rows)


def decode_rate(engine: EngineProcess, batch: int, context: int, run: int) -> float:
    """Tokens a second that ours decodes. run: as for `marked`."""
    prompts = tuple(([i + j for j in range(context)], OUTPUT) for i in range(batch))
    workload = Workload("decode", "", prompts)
    seconds: float = engine.run(workload.name, marked(workload, run))["seconds"]
    return batch * OUTPUT / seconds


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
