"""A tiny model folder, for servers that are processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_llm import save_tiny_llm


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llm")
    save_tiny_llm(folder)
    return folder
