from __future__ import annotations

import pytest
from simulated import keep_workers

from pagedkv.simulation.worker import Worker


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """Those of the clusters of a test, to be looked at afterwards."""
    return keep_workers(monkeypatch)
