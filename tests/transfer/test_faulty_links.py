"""A fault at every message, a death at every tick: nothing leaks, no token is lost or wrong."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moving_world import DEATHS, FRAME_FAULTS, PAYLOAD_FAULTS, World, hello

from pagedkv.transfer.arrival import ReceiverState
from pagedkv.transfer.departure import SenderState
from pagedkv.transfer.messages import MoveId

PROMPT = list(range(10, 32))
OUTPUT = 24
MODES = ("prefilled", "live")
MOVE = MoveId("r", 1)
SIZES = {"P": 4, "D": 3}


def run(
    mode: str, faults: Mapping[int, str], told: bool = True, kill: tuple[int, str] | None = None
) -> World:
    """A request is moved from P to D, which already has a part of its prompt."""
    world = World([hello(n, 40, size) for n, size in SIZES.items()], faults, deaths_are_told=told)
    world.submit("before", "D", PROMPT[:7], 1)
    world.submit("r", "P", PROMPT, OUTPUT)
    world.tick()
    world.tick()
    world.move("r", "D", mode)
    for _ in range(600):
        if kill is not None and world.ticks == kill[0]:
            world.note_states(MOVE)
            if kill[1] == "front":
                world.front_alive = False
            else:
                world.kill(kill[1])
        world.tick()
        if world.idle and (kill is None or world.ticks > kill[0]):
            break
    else:
        raise AssertionError(f"not idle: {world.network.kinds[-10:]}")
    world.check_end()
    return world


BASELINE = {mode: run(mode, {}) for mode in MODES}


@pytest.mark.parametrize("fault", [*FRAME_FAULTS, *PAYLOAD_FAULTS])
@pytest.mark.parametrize("mode", MODES)
def test_a_fault_at_any_message_changes_nothing(mode: str, fault: str) -> None:
    for number in range(BASELINE[mode].network.count):
        world = run(mode, {number: fault})
        assert world.raised == ["r"], f"message {number}"
        assert not world.resumed, f"message {number}"


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("mode", MODES)
def test_a_death_at_any_message_loses_nothing(mode: str, death: str, told: bool) -> None:
    for number in range(BASELINE[mode].network.count):
        run(mode, {number: death}, told)


@pytest.mark.parametrize("who", ["P", "D", "front"])
@pytest.mark.parametrize("mode", MODES)
def test_a_death_at_any_tick_loses_nothing(mode: str, who: str) -> None:
    states: set[str] = set()
    for tick in range(2, BASELINE[mode].ticks):
        states |= run(mode, {}, kill=(tick, who)).states_at_death
    assert states == {"none", *SenderState, *ReceiverState}


FAULTS = st.dictionaries(
    st.integers(0, 60), st.sampled_from([*FRAME_FAULTS, *PAYLOAD_FAULTS]), max_size=12
)


@given(mode=st.sampled_from(MODES), faults=FAULTS)
def test_many_faults_lose_nothing(mode: str, faults: dict[int, str]) -> None:
    run(mode, faults)


@given(
    mode=st.sampled_from(MODES),
    faults=FAULTS,
    death=st.tuples(st.integers(0, 40), st.sampled_from(DEATHS)),
    told=st.booleans(),
)
def test_many_faults_and_a_death_lose_nothing(
    mode: str, faults: dict[int, str], death: tuple[int, str], told: bool
) -> None:
    run(mode, faults | {death[0]: death[1]}, told)


@given(faults=FAULTS, pauses=st.lists(st.integers(1, 12), min_size=3, max_size=3))
def test_a_request_that_is_sent_to_and_fro_has_one_owner(
    faults: dict[int, str], pauses: list[int]
) -> None:
    """Beside another one that stays; the next move may begin before the last has ended."""
    world = World([hello(name, 40, size) for name, size in SIZES.items()], faults)
    world.submit("r", "P", PROMPT, 60)
    world.submit("s", "D", PROMPT[:9], 60)
    for pause, mode in zip(pauses, ("prefilled", "live", "live"), strict=True):
        for _ in range(pause):
            world.tick()
        if "r" not in world.ended:
            owner = world.fence.owner("r")
            assert owner is not None
            world.move("r", "D" if owner.worker == "P" else "P", mode)
    world.run()
    world.check_end()
