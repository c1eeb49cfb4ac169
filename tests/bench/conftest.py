"""A tiny model folder for steps."""

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
