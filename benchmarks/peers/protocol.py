"""How the driver talks to an engine: lines of JSON over stdin and stdout.

An adapter derives from `Engine` and calls `serve`. Standard library only, since it runs under the
interpreter of whatever engine it is.

    -> {"workload": "W1", "requests": [[[ids], output tokens], ...]}
    <- {"seconds": ..., "tokens": [[ids], ...], "peak_bytes": ..., "cpu_seconds": ...}

The first line that an engine writes is {"ready": what it runs with}. It ends with its stdin.
Between two lines it does nothing, so that another one can be measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Requests = list[tuple[list[int], int]]


class Engine:
    """info: versions, precision and settings, as the engine itself reports them."""

    info: dict[str, str]

    def prepare(self, workload: str, requests: Requests) -> None:
        """What is not to be measured, such as starting a server."""

    def generate(self, workload: str, requests: Requests) -> list[list[int]]:
        """The output tokens of each request; greedy, of exactly the length asked for."""
        raise NotImplementedError  # the one thing that each adapter must say itself

    def pids(self, workload: str) -> list[int]:
        """The processes whose memory and CPU time count."""
        return [os.getpid()]

    def close(self) -> None:
        """Ends what it has started."""


def serve(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Makes an engine from the options in the first argument and runs what stdin asks for."""
    # Libraries print; stdout is for answers alone.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = load(json.loads(sys.argv[1]))
    try:
        print(json.dumps({"ready": engine.info}), file=answers)
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps(measure(engine, asked["workload"], asked["requests"])), file=answers)
    finally:
        engine.close()


def measure(engine: Engine, workload: str, requests: Requests) -> dict[str, Any]:
    """One run: wall time from the submission of all requests to the last token.

    peak_bytes: the most physical memory during the run, with what was held before it.
    """
    engine.prepare(workload, requests)
    pids = engine.pids(workload)
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
    before, start = cpu_seconds(pids), time.perf_counter()
    tokens = engine.generate(workload, requests)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "tokens": tokens,
        "peak_bytes": sum(peak_bytes(pid) for pid in pids),
        "cpu_seconds": cpu_seconds(pids) - before,
    }


def peak_bytes(pid: int) -> int:
    """Peak resident memory of a process since `clear_refs`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/status does not say VmHWM: memory is measured on Linux only")


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of processes with all their threads."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            parents[int(folder.name)] = int(fields[1])
    family = [pid]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family
