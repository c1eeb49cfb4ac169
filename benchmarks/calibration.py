"""The line that is printed beside every absolute figure."""

from __future__ import annotations

from pagedkv.bench.calibration import calibrate


def print_calibration() -> None:
    print(calibrate())
