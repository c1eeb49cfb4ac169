"""Runs every benchmark of this folder once, in half an hour in all, and prints what each took.

Run: python benchmarks/run_all.py [NAME ...]

Some are run for less time, or on fewer requests, than they are by themselves; the arguments are
printed. One that fails does not stop the others; the exit status is 1 then.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
LESS = {
    "bench_cluster": ("--workers", "10", "100", "--requests", "20"),
    "bench_deadlines": ("--minutes", "2", "--loads", "1.0", "1.5"),
    "bench_engine": ("--rounds", "1"),
    "bench_fairness": ("--seconds", "200"),
    "bench_prediction": ("--seconds", "15"),
    "bench_recovery": ("--requests", "30"),
    "bench_router": ("--decisions", "20000"),
    "bench_simulation": ("--runs", "1"),
}


def main(names: Sequence[str]) -> int:
    found = {path.stem: path for path in sorted(FOLDER.glob("bench_*.py"))}
    unknown = [name for name in names if name not in found]
    if unknown:
        print(f"no benchmarks: {', '.join(unknown)}; there are {', '.join(found)}")
        return 2
    took: dict[str, float] = {}
    failed = []
    for name in names or found:
        arguments = LESS.get(name, ())
        print(f"== {' '.join((name, *arguments))}", flush=True)
        start = time.monotonic()
        if subprocess.run([sys.executable, str(found[name]), *arguments]).returncode:
            failed.append(name)
        took[name] = time.monotonic() - start
    print("== seconds that each took")
    for name, seconds in took.items():
        print(f"{name:24}{seconds:8.0f}{'   failed' if name in failed else ''}")
    print(f"{'together':24}{sum(took.values()):8.0f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
