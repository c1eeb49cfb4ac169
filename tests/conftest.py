"""What holds after every test: nothing is held, no lease is open, every invariant is clean."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from pagedkv.cache import BlockManager

# Torch reads these when it is loaded, later. Several test processes share few cores: threads that
# wait actively for each other's cores cost a hundred times the work. Tests of threading ask for
# what they need.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "PAGEDKV_NUM_THREADS": "1",
}.items():
    os.environ.setdefault(_name, _value)

_PASSED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "keeps_blocks(why): the test ends with blocks held on purpose; the reason is required",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    if call.when == "call":
        item.stash[_PASSED] = report.passed
    return report


@pytest.fixture(autouse=True)
def nothing_stays_held(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Records every BlockManager made during a test and looks at all of them at its end."""
    made: list[BlockManager] = []
    initialise = BlockManager.__init__

    def recording(self: BlockManager, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(BlockManager, "__init__", recording)
    yield
    marker = request.node.get_closest_marker("keeps_blocks")
    if marker is not None and not marker.args:
        pytest.fail("keeps_blocks needs the reason why blocks stay held")
    if marker is None and request.node.stash.get(_PASSED, False):
        for manager in made:
            assert_nothing_held(manager)


def assert_nothing_held(manager: BlockManager) -> None:
    """Every sequence is closed, every lease released, and `check` finds nothing."""
    manager.check()
    assert manager.num_open_sequences == 0, f"{manager.num_open_sequences} sequences left open"
    assert not manager.leases, f"leases {sorted(manager.leases)} left open"
    assert manager.num_held_blocks == 0, f"{manager.num_held_blocks} blocks left held"
    assert manager.num_draining_blocks == 0, f"{manager.num_draining_blocks} blocks left draining"
