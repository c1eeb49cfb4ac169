"""The same calls give the same block ids, steps and outputs, in whatever process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def printed(hash_seed: str) -> list[str]:
    paths = [HERE.parent / "scheduling", *map(Path, os.environ.get("PYTHONPATH", "").split(":"))]
    done = subprocess.run(
        [sys.executable, HERE / "determined_run.py"],
        env={
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": ":".join(map(str, paths)),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_run_is_the_same_under_another_order_of_sets() -> None:
    """Hash seeds change the order in which sets and dicts of strings are walked."""
    first, second = printed("1"), printed("2")
    assert len(first) > 100
    for one, other in zip(first, second, strict=True):
        assert one == other
