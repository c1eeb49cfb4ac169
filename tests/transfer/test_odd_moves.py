"""What seldom happens to a move: clocks that jump, rivals, messages that cross, a huge prompt."""

from __future__ import annotations

import moving_world
import numpy as np
import pytest
import xxhash
from moving_world import LIMITS, NAMING, World, hello
from receiving import MOVE, TOKENS, Receiving

from pagedkv.cache import BlockManager
from pagedkv.transfer.actions import Abandoned, Reclaimed, Send
from pagedkv.transfer.endpoint import Endpoint
from pagedkv.transfer.limits import TransferLimits
from pagedkv.transfer.messages import Cancel, Grant, MoveId

PROMPT = list(range(10, 32))
MODES = ("prefilled", "live")


def two(mode: str, output: int = 24) -> World:
    """A move from P to D begins."""
    world = World([hello("P", 40, 4), hello("D", 40, 3)])
    world.submit("r", "P", PROMPT, output)
    world.tick()
    world.move("r", "D", mode)
    return world


@pytest.mark.parametrize("jump", [-2.0, LIMITS.lease, 2 * LIMITS.memory])
@pytest.mark.parametrize("who", ["P", "D", "PD"])
@pytest.mark.parametrize("mode", MODES)
def test_a_clock_that_jumps_costs_a_move_at_most(mode: str, who: str, jump: float) -> None:
    """A machine that slept: leases end at once, and what was remembered is forgotten."""
    moved = 0
    for tick in range(1, 24):
        world = two(mode)
        while world.ticks < tick:
            world.tick()
        world.clocks = dict.fromkeys(who, jump)
        world.run()
        world.check_end()
        assert not world.resumed
        moved += len(world.raised)
    assert moved > 0


@pytest.mark.parametrize("mode", MODES)
def test_clocks_that_differ_by_days_do_not_matter(mode: str) -> None:
    world = two(mode)
    world.clocks = {"P": -3e5, "D": 7e5}
    world.run()
    world.check_end()
    assert world.raised == ["r"] and not world.failed


@pytest.mark.parametrize("mode", MODES)
def test_of_two_moves_of_one_request_one_becomes_its_owner(mode: str) -> None:
    """Both under way at once, to two workers, the second at any moment of the first."""
    winners = set()
    for tick in range(1, 16):
        world = World([hello("P", 40, 4), hello("D", 40, 3), hello("E", 40, 5)])
        world.submit("r", "P", PROMPT, 40)
        world.tick()
        world.move("r", "D", mode)
        while world.ticks < tick:
            world.tick()
        owner = world.fence.owner("r")
        assert owner is not None
        first_is_over = owner.worker != "P"
        if not first_is_over:
            world.move("r", "E", "live")
        world.run()
        world.check_end()
        assert len(world.raised) == 1 and not world.resumed
        if first_is_over:
            break
        winners |= {name for name in "DE" if world.workers[name].num_computed}
    assert "E" in winners


def test_a_worker_does_not_move_a_request_to_itself() -> None:
    manager = BlockManager(8, 4)
    end = Endpoint(manager, hello("P", 8, 4), LIMITS)
    before = manager.snapshot()
    assert end.start(MOVE, "P", TOKENS, NAMING, "live", 0, 0.0) == [
        Reclaimed(MOVE, "the request is at 'P' already")
    ]
    assert not end.sender.moves and manager.snapshot() == before


def test_a_cancel_that_overtakes_the_commit_ends_the_move() -> None:
    d = Receiving()
    grant = d.reserve()
    d.put(grant, 0, 12)
    assert d.end.handle("P", Cancel(*MOVE, "it has ended"), 0.0) == [
        Abandoned(MOVE, "it has ended")
    ]
    assert d.available == 8
    for _ in range(2):
        (refused,) = d.commit(grant)
        assert isinstance(refused, Send) and refused.message == Cancel(*MOVE, "it has ended")
    assert d.end.own(MOVE, 0.0) == [Abandoned(MOVE, "no complete copy of it is here")]
    assert d.available == 8 and d.manager.num_open_sequences == 0


def test_no_row_is_kept_by_what_found_no_blocks() -> None:
    """sglang PR#16067: a slot of its own was lost where the K/V found no room."""
    d = Receiving(num_blocks=4)
    taken = d.manager.open([9] * 8)
    d.manager.reserve([taken], [8])
    for epoch in range(2 * d.manager.max_seqs):
        assert d.reserve(MoveId("s", epoch)).reason == (
            "3 blocks needed and 0 kept for others, 2 available"
        )
    assert d.manager.num_open_sequences == 1
    d.manager.close(taken)
    assert isinstance(d.reserve(), Grant)
    d.end.disown(MOVE, "over", 0.0)
    assert d.available == 4


def test_a_very_long_prompt_moves_in_few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 tokens; K/V of 16 bytes a token, of the token and its place alone."""

    def kv_of(tokens: list[int], position: int) -> bytes:
        return xxhash.xxh3_128_digest(b"%d at %d" % (tokens[position], position))

    monkeypatch.setattr(moving_world, "kv_of", kv_of)
    length, piece = 100_000, 1 << 18
    limits = TransferLimits(lease=4.0, retry=1.0, patience=6.0, piece_bytes=piece)
    prompt = (np.arange(length) % 997).tolist()
    world = World([hello("P", 2000, 64), hello("D", 3300, 32)], limits=limits, chunk=length)
    world.submit("r", "P", prompt, 3)
    world.tick()
    world.move("r", "D", "prefilled")
    world.run()
    world.check_end()
    assert world.raised == ["r"] and world.sent_tokens == length + 1
    assert world.network.kinds.count("Data") <= length * 16 // piece + 3
    # Each once, but for the last one, which nothing follows.
    assert sum(worker.num_computed for worker in world.workers.values()) == length + 2
