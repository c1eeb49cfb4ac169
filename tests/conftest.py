"""What holds after every test: nothing is held, no lease is open, every invariant is clean."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

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

# The same examples everywhere, and no test judged by the clock of a busy machine.
settings.register_profile("pagedkv", deadline=None, derandomize=True)
settings.load_profile("pagedkv")

_PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    if call.when == "call":
        item.stash[_PASSED] = report.passed
    return report


class Managers:
    """The BlockManagers that are alive, those of module and session fixtures too.

    The ones made during the present test are kept alive until its end, so that a manager which the
    test let go of is looked at as well.
    """

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[BlockManager] = weakref.WeakSet()
        self.new: list[BlockManager] = []

    def add(self, manager: BlockManager) -> None:
        self.alive.add(manager)
        self.new.append(manager)


@pytest.fixture(scope="session", autouse=True)
def block_managers() -> Iterator[Managers]:
    """Records every BlockManager that is made."""
    managers = Managers()
    initialise = BlockManager.__init__

    def recording(self: BlockManager, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        managers.add(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockManager, "__init__", recording)
        yield managers


@pytest.fixture(autouse=True)
def nothing_stays_held(request: pytest.FixtureRequest, block_managers: Managers) -> Iterator[None]:
    """Looks at every live manager at the end of a test that passed."""
    yield
    made, block_managers.new = block_managers.new, []
    planted = request.node.get_closest_marker("plants_faults") is not None
    if planted or not request.node.stash.get(_PASSED, False):
        # What a failed test left behind, or one that breaks managers, is not the next one's fault.
        block_managers.alive.difference_update(made)
        return
    for manager in list(block_managers.alive):
        block_managers.alive.discard(manager)  # reported once
        assert_nothing_held(manager)
        block_managers.alive.add(manager)


def assert_nothing_held(manager: BlockManager) -> None:
    """Every sequence is closed, every lease released, and `check` finds nothing."""
    manager.check()
    assert manager.num_open_sequences == 0, f"{manager.num_open_sequences} sequences left open"
    assert not manager.leases, f"leases {sorted(manager.leases)} left open"
    assert manager.num_held_blocks == 0, f"{manager.num_held_blocks} blocks left held"
    assert manager.num_draining_blocks == 0, f"{manager.num_draining_blocks} blocks left draining"
