"""Every reachable state of small managers: the invariants hold and each sequence reads its own.

The numbers are known; a change of them is a change of what the cache can do, to be understood
(docs/decisions/0060-the-exhaustive-small-scope.md) before the number is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from explorer import Explorer, Frozen, Scope

from pagedkv.cache import BlockManager, OutOfBlocks


def exhaust(scope: Scope) -> tuple[int, int]:
    explorer = Explorer(scope)
    explorer.explore()
    explorer.drain()
    print(f"{scope}: {explorer.states:,} states, {explorer.transitions:,} transitions")
    return explorer.states, explorer.transitions


@pytest.mark.parametrize(
    ("shape", "states", "transitions"),
    [
        pytest.param((2, 1, 2), 112, 807, id="2-1-2"),
        pytest.param((2, 2, 4), 1_691, 18_481, id="2-2-4"),
        pytest.param((3, 1, 3), 601, 5_977, id="3-1-3"),
        pytest.param((3, 2, 4), 22_327, 291_674, id="3-2-4"),
    ],
)
def test_every_state_of_two_sequences(
    shape: tuple[int, int, int], states: int, transitions: int
) -> None:
    assert exhaust(Scope(*shape)) == (states, transitions)


def test_every_state_of_three_sequences() -> None:
    scope = Scope(num_blocks=2, block_size=1, longest=2, max_seqs=3)
    assert exhaust(scope) == (322, 3_560)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("shape", "states", "transitions"),
    [
        pytest.param((4, 2, 5, 2), 322_192, 5_630_229, id="4-2-5-2"),
        pytest.param((3, 1, 3, 3), 2_273, 34_677, id="3-1-3-3"),
        pytest.param((2, 2, 4, 3), 7_928, 131_851, id="2-2-4-3"),
    ],
)
def test_every_state_of_larger_scopes(
    shape: tuple[int, int, int, int], states: int, transitions: int
) -> None:
    """From seconds to a quarter of an hour on one idle core."""
    assert exhaust(Scope(*shape)) == (states, transitions)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((2, 1, 2), id="2-1-2"),
        pytest.param((3, 1, 3), id="3-1-3", marks=pytest.mark.deep),
        pytest.param((2, 2, 4), id="2-2-4", marks=pytest.mark.deep),
    ],
)
def test_states_of_equal_key_behave_alike(shape: tuple[int, int, int]) -> None:
    """So one state of each key is enough: whichever is taken, the same keys follow."""
    explorer, follow = Explorer(Scope(*shape)), dict[bytes, list[tuple[str, bytes]]]()
    reached = {explorer.key(): 1}
    states = [(explorer.key(), explorer.freeze())]
    while states:
        key, state = states.pop()
        after = []
        for action, next_key in explorer.successors(state):
            after.append((f"{action.func.__name__}{action.args}", next_key))
            reached[next_key] = reached.get(next_key, 0) + 1
            if reached[next_key] <= 8:
                states.append((next_key, explorer.freeze()))
        assert follow.setdefault(key, after) == after
    assert sum(min(n, 8) for n in reached.values()) > 5 * len(follow)
    explorer.drain()


class Planted(Explorer):
    """Does one thing that the manager does not know of."""

    def __init__(self, scope: Scope, fault: str) -> None:
        super().__init__(scope)
        self.fault = fault
        self.start = self.freeze()

    def wipe_free(self) -> None:
        super().wipe_free()
        pool = self.manager.pool
        if self.fault == "slot" and len(self.sequences) == 2 and self.sequences[0].tokens:
            self.wipe(int(self.manager.block_table(self.sequences[0].seq)[0]))
        if self.fault == "count" and pool.counts.max() > 1:
            pool.counts[pool.counts.argmax()] -= 1
        if self.fault == "name" and pool.extents.any():
            self.manager.contents[pool.extents.argmax()] ^= 1

    def expect(self, kind: type[Exception], call: partial[Any]) -> None:
        super().expect(kind, partial(len, ()) if self.fault == "accepted" else call)
        if self.fault == "refusal" and kind is OutOfBlocks:
            self.manager.pool.counts[0] += 1


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("slot", "reads None"),
        ("count", "holders name it"),
        ("name", "its name is not its content"),
        ("accepted", "was not refused"),
        ("refusal", "a refusal changed something"),
    ],
)
def test_control_a_planted_fault_is_found(fault: str, found: str) -> None:
    explorer = Planted(Scope(num_blocks=2, block_size=2, longest=4), fault)
    with pytest.raises(Exception, match=found):
        explorer.explore()
    explorer.thaw(explorer.start)


def test_memory_reloads_all_that_a_snapshot_has() -> None:
    """The explorer's own way to go back to a state misses nothing."""

    snapshots: dict[Frozen, bytes] = {}

    class Compared(Explorer):
        def freeze(self) -> Frozen:
            state, data = super().freeze(), self.manager.snapshot()
            snapshots[state] = data
            return state

        def thaw(self, state: Frozen) -> None:
            super().thaw(state)
            assert self.manager.snapshot() == snapshots[state]

    explorer = Compared(Scope(num_blocks=2, block_size=1, longest=2))
    explorer.explore()
    explorer.drain()
    assert len(snapshots) == explorer.states
    for data in snapshots.values():
        restored = BlockManager.restore(data)
        assert restored.snapshot() == data
        for row in restored.table.open_rows().tolist():
            restored.close(restored.table.seq(row))
