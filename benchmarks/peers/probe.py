"""The limits of this machine now, as a line of JSON: `python -m peers.probe DTYPE`.

In a process of its own, so that its memory and threads are gone when engines are measured.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch

from pagedkv.bench.limits import measure_limits
from pagedkv.engine.build import set_threads


def main() -> None:
    set_threads()
    print(json.dumps(asdict(measure_limits(getattr(torch, sys.argv[1])))))


if __name__ == "__main__":
    main()
