"""What the machine can give, from the seconds of two calls."""

from __future__ import annotations

import torch

from pagedkv.bench.calibration import calibrate
from pagedkv.bench.limits import MULTIPLY, READ, Limits, Yardstick, measure_limits


def test_rates_are_those_of_the_fastest_tenth() -> None:
    yardstick = Yardstick(torch.float32, num_bytes=2**20)
    limits = yardstick.limits({READ: [1.0, 0.5, 2.0], MULTIPLY: [2.0, 4.0]})
    assert limits == Limits(2**20 / 0.5, 2 * 1024**3 / 2.0)


def test_both_calls_run() -> None:
    calls = Yardstick(torch.bfloat16, num_bytes=2**16).calls()
    assert float(calls[READ]()) == 2**14
    assert calls[MULTIPLY]()[0, 0] == 1024.0


def test_the_floor_is_the_larger_of_both() -> None:
    limits = Limits(100.0, 1000.0)
    assert limits.floor(50.0, 100.0) == 0.5
    assert limits.floor(50.0, 2000.0) == 2.0


def test_this_machine_has_some() -> None:
    limits = measure_limits(torch.float32, seconds=0.0)
    assert min(limits.read_bandwidth, limits.matrix_rate) > 1e6
    calibration = calibrate()
    assert min(calibration.python_loop_ns, calibration.copy_gb_per_s) > 0
