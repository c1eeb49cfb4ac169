"""A tiny model folder, and servers of it with workers: one of each kind for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from clustered import Clustered, clustered
from tiny_llm import save_tiny_llm


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llm")
    save_tiny_llm(folder)
    return folder


@pytest.fixture(scope="module")
def replicas(model: Path) -> Iterator[Clustered]:
    with clustered(model, "--workers", "2") as server:
        yield server


@pytest.fixture(scope="module")
def split(model: Path) -> Iterator[Clustered]:
    with clustered(model, "--prefill-workers", "1", "--decode-workers", "1") as server:
        yield server
