"""How fast is this engine beside llama.cpp, vLLM and OpenVINO GenAI, on this machine, now?

Run: make bench-peers ARGS="--rounds 5 --only W1,W3 --engines pagedkv,vLLM"

Every engine runs in a process of its own and is idle while another is measured. All have the same
weights, two bytes (or, with --dtype float32, four) for a weight and for a value of K/V, the same
prompts as token ids, greedy decoding to exact lengths. A round runs each workload once in each
engine, one after the other; figures are medians over the rounds, ratios those within a round. Each
peer is tried with several settings; the table has its best for each workload.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import Tokenizer

from calibration import print_calibration
from pagedkv.bench.limits import Limits
from pagedkv.models.embedded import cache_root, embedded_folder
from peers.catalogue import OURS, Missing, Place, catalogue
from peers.compare import compare
from peers.curve import print_curves
from peers.engines import EngineDied, EngineProcess, Setting
from peers.floor import Shape, floor_seconds
from peers.tables import as_json, settings_tables, speed_table
from peers.workloads import SEED, TEXT, Workload, make_workloads

FOLDER_VARIABLE = "PAGEDKV_PEERS"
IDLE = 0.02  # of a processor: what all engines that are not measured may use


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m peers", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one more")
    parser.add_argument("--only", help="workloads, such as W1,W3")
    parser.add_argument("--engines", help="engines by name, such as pagedkv,vLLM")
    parser.add_argument("--seed", type=int, default=SEED, help="another draw of the workloads")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--http", action="store_true", help="through servers: ours and llama.cpp's")
    parser.add_argument("--curve", action="store_true", help="decoding by batch and by context")
    parser.add_argument("--json", type=Path, help="write the results there")
    own = os.environ.get(FOLDER_VARIABLE) or cache_root() / "peers"
    parser.add_argument(
        "--peers", type=Path, default=Path(own), help=f"folder of the peers (${FOLDER_VARIABLE})"
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: give at least 1")
    return options


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def chosen_workloads(model: Path, seed: int, only: str | None) -> dict[str, Workload]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    workloads = make_workloads(tokenizer.encode(TEXT, add_special_tokens=False).ids, seed)
    names = only.split(",") if only else list(workloads)
    if unknown := set(names) - workloads.keys():
        raise SystemExit(f"--only {only}: there is no {min(unknown)}; use {', '.join(workloads)}")
    return {name: workloads[name] for name in names}


def chosen_settings(settings: list[Setting], engines: str | None) -> list[Setting]:
    if engines is None:
        return settings
    wanted = set(engines.lower().split(","))
    if unknown := wanted - {setting.engine.lower() for setting in settings}:
        raise SystemExit(f"--engines {engines}: {min(unknown)} is unknown or not installed")
    return [setting for setting in settings if setting.engine.lower() in wanted]


def probe(dtype: str) -> Limits:
    command = [sys.executable, "-m", "peers.probe", dtype]
    return Limits(**json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # engines end, too
    options = parse()
    place = Place(options.peers.expanduser().absolute(), options.dtype)
    print_calibration()
    subprocess.run([sys.executable, "-m", "peers.settle"], check=True)
    if options.curve:
        print_curves(place, options.rounds, options.json, say)
        return
    dtype: torch.dtype = getattr(torch, options.dtype)
    model = embedded_folder(dtype)
    workloads = chosen_workloads(model, options.seed, options.only)
    settings, missing = catalogue(place, http=options.http, mixed=workloads.get("W2"))
    probes: list[Limits] = []
    with ExitStack() as stack:
        engines = []
        for setting in chosen_settings(settings, options.engines):
            say(f"starting {setting}")
            try:
                engines.append(stack.enter_context(EngineProcess(setting)))
            except EngineDied as error:
                missing.append(Missing(f"{setting} does not start", str(error)))
        if not engines:
            raise SystemExit("no engine has started: nothing to compare")
        result = compare(
            engines, workloads, options.rounds, say, lambda: probes.append(probe(options.dtype))
        )
        info = {engine.setting: engine.info for engine in engines}
    limits = Limits(
        statistics.median(limits.read_bandwidth for limits in probes),
        statistics.median(limits.matrix_rate for limits in probes),
    )
    shape = Shape.of(json.loads((model / "config.json").read_text()))
    floors = {
        name: floor_seconds(workload, shape, limits, dtype.itemsize)
        for name, workload in workloads.items()
    }
    print(f"\n{options.dtype}, seed {options.seed}, {options.rounds} rounds; {limits}")
    print("\n".join(["", *speed_table(result, workloads, floors, OURS)]))
    print("\n".join(["", *settings_tables(result, workloads), ""]))
    for lack in missing:
        print(f"missing: {lack.what}: {lack.remedy}")
    for failed, why in result.failed.items():
        print(f"gave up: {failed}: {why}")
    every = [run for runs in result.runs.values() for each in runs.values() for run in each]
    worst = max((run.others_cpu / run.seconds for run in every), default=0.0)
    if worst > IDLE:
        print(f"idle engines used up to {worst:.0%} of a processor while another was measured")
    if options.json is not None:
        data = as_json(result, workloads, floors, info)
        data |= {
            "dtype": options.dtype,
            "seed": options.seed,
            "limits": [asdict(each) for each in probes],
        }
        data["missing"] = [lack.what for lack in missing]
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
