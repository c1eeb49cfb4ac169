"""Moves over links that lose nothing: what is computed, what is sent, how long a request stands."""

from __future__ import annotations

from typing import Any

import pytest
from moving_world import World, hello

from pagedkv.transfer.departure import Mode

PROMPT = list(range(10, 32))


def moved(
    mode: Mode, prompt: list[int], output: int, sizes: tuple[int, int], **options: Any
) -> World:
    """A request that is moved from P to D, in mode "live" when it decodes."""
    world = World([hello("P", 400, sizes[0]), hello("D", 400, sizes[1])], **options)
    world.submit("r", "P", prompt, output)
    world.tick()
    while mode == "live" and not world.delivered["r"]:
        world.tick()
    world.move("r", "D", mode)
    world.run()
    world.check_end()
    assert world.raised == ["r"] and not world.resumed and not world.failed
    return world


@pytest.mark.parametrize("mode", ["prefilled", "live"])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 3), (3, 4), (1, 8), (8, 1)])
def test_no_token_is_computed_twice(mode: Mode, sizes: tuple[int, int]) -> None:
    world = moved(mode, PROMPT, 40, sizes)
    computed = {name: worker.num_computed for name, worker in world.workers.items()}
    assert sum(computed.values()) == len(PROMPT) + 39
    if mode == "prefilled":
        assert computed["P"] == len(PROMPT)


@pytest.mark.parametrize("delay", [1, 3, 8])
@pytest.mark.parametrize("mode", ["prefilled", "live"])
def test_deltas_may_be_later_than_the_word_of_the_new_owner(mode: Mode, delay: int) -> None:
    world = moved(mode, PROMPT, 40, (4, 4), front_delays={"P": delay, "D": 1})
    assert world.workers["D"].num_computed


def test_a_decoding_request_stands_still_for_its_last_block_only() -> None:
    """However long it is: what remains when it stops is less than a block, and the time is one."""
    stood = set()
    for length in (5, 40, 160, 640):
        world = moved("live", [7] * length, 80, (16, 16), chunk=64)
        (remaining,) = world.workers["P"].remaining
        assert remaining < 16
        stood |= set(world.workers["P"].parked_for.values())
        # The rest was sent while it decoded.
        assert world.network.kinds.count("Commit") == 1
    assert len(stood) == 1


def test_a_prompt_is_sent_while_it_is_computed() -> None:
    world = World([hello("P", 40, 4), hello("D", 40, 4)])
    world.submit("r", "P", [5] * 40, 8)
    world.tick()
    world.move("r", "D", "prefilled")
    while not world.delivered["r"]:
        world.tick()
    sent = world.network.kinds.count("Data")
    assert sent >= 4
    world.run()
    world.check_end()
    assert world.raised == ["r"] and world.network.kinds.count("Data") - sent <= 2


@pytest.mark.parametrize("shared", range(0, 23))
def test_only_what_the_receiver_lacks_is_sent(shared: int) -> None:
    world = World([hello("P", 40, 4), hello("D", 40, 4)])
    # D computes the prompt's beginning, and one token that differs.
    world.submit("before", "D", [*PROMPT[:shared], 999], 1)
    world.run()
    computed = world.workers["D"].num_computed
    world.submit("r", "P", PROMPT, 10)
    world.tick()
    world.move("r", "D", "prefilled")
    world.run()
    world.check_end()
    cached = min(shared, len(PROMPT) - 1)
    assert world.sent_tokens == len(PROMPT) - cached // 4 * 4
    assert world.workers["D"].num_computed - computed == 9


def test_a_move_that_failed_leaves_what_it_brought() -> None:
    """The next attempt sends the rest only."""
    world = World([hello("P", 40, 4), hello("D", 40, 4)])
    world.submit("r", "P", PROMPT, 40)
    world.tick()
    first = world.move("r", "D", "live")
    while world.network.kinds.count("Data") < 2:
        world.tick()
    for _ in range(3):
        world.tick()
    sent = world.sent_tokens
    world.judge(world.fence.move_failed(first, "P"))
    world.workers["P"].abandon("r")
    for _ in range(4):
        world.tick()
    world.move("r", "D", "live")
    world.run()
    world.check_end()
    assert world.raised == ["r"]
    known = len(PROMPT) + 39
    assert world.sent_tokens <= sent + known - sent // 4 * 4 and sent >= 8


def test_a_worker_that_can_never_take_it_is_asked_once() -> None:
    world = World([hello("P", 40, 4), hello("D", 3, 4)])
    world.submit("r", "P", PROMPT, 40)
    world.tick()
    world.move("r", "D", "live")
    world.run()
    world.check_end()
    assert not world.raised and world.network.kinds.count("Reserve") == 1


@pytest.mark.parametrize("mode", ["prefilled", "live"])
@pytest.mark.parametrize("tick", range(3, 20))
def test_a_request_may_be_preempted_while_it_moves(mode: Mode, tick: int) -> None:
    world = World([hello("P", 40, 4), hello("D", 40, 4)])
    world.submit("r", "P", PROMPT, 60)
    world.tick()
    world.move("r", "D", mode)
    while world.ticks < tick:
        world.tick()
    world.workers["P"].preempt("r")
    world.run()
    world.check_end()
    assert world.raised == ["r"] and not world.resumed and not world.failed


@pytest.mark.parametrize("mode", ["prefilled", "live"])
def test_a_move_that_was_not_granted_survives_the_receivers_restart(mode: Mode) -> None:
    world = World([hello("P", 40, 4), hello("D", 40, 4)], deaths_are_told=False)
    world.submit("before", "P", PROMPT, 10)
    world.tick()
    world.move("before", "D", mode)
    world.run()
    world.restart("D")
    world.submit("r", "P", PROMPT, 60)
    world.tick()
    world.move("r", "D", mode)
    world.run()
    world.check_end()
    assert world.raised == ["before", "r"] and not world.failed
