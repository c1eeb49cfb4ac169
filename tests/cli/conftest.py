"""A tiny model folder for the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "engine"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tiny_llm import save_tiny_llm

    folder = tmp_path_factory.mktemp("tiny-llm")
    save_tiny_llm(folder)
    return str(folder)


@pytest.fixture
def quick_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine can give is told, not measured: half a second and 512 MiB each time."""
    import torch

    from pagedkv.bench.calibration import Calibration
    from pagedkv.bench.limits import Limits

    def limits(dtype: torch.dtype) -> Limits:
        return Limits(30e9, 400e9)

    monkeypatch.setattr("pagedkv.bench.calibration.calibrate", lambda: Calibration(40.0, 12.0))
    monkeypatch.setattr("pagedkv.bench.limits.measure_limits", limits)
