"""Faults that others have reported in transfers of K/V, each as its smallest case."""

from __future__ import annotations

import pytest
from moving_world import LIMITS, NAMING, TICK, World, hello, next_token, undisturbed
from receiving import MOVE, TOKENS, Receiving, answer

from pagedkv.cache import BlockManager
from pagedkv.transfer.actions import Abandoned, Released, Send, Write
from pagedkv.transfer.endpoint import Endpoint
from pagedkv.transfer.messages import (
    Ack,
    Cancel,
    Data,
    Deny,
    Grant,
    MoveId,
    Nack,
    Reserve,
    pack_tokens,
)


def test_a_sender_that_never_reports_keeps_no_blocks() -> None:
    """vllm#46283: blocks were parked for a signal that never came."""
    d = Receiving()
    grant = d.reserve()
    assert d.manager.num_held_blocks == 3
    actions = d.end.tick(LIMITS.lease)
    assert Abandoned(MOVE, "nothing was heard of 'P' for 4.0 s") in actions
    assert d.available == 8
    other = d.reserve(MoveId("s", 1), "Q", LIMITS.lease)  # has the blocks now
    assert isinstance(other, Grant)
    late = answer(d.data(grant, 0, 4, LIMITS.lease))
    assert isinstance(late, Cancel)
    assert d.manager.num_held_blocks == 3
    d.end.disown(other.move, "over", LIMITS.lease)


def test_a_completion_after_the_abort_frees_nothing_twice() -> None:
    """vllm-ascend#16662: the completion that would have freed the blocks was dropped."""
    d = Receiving()
    for epoch in range(100):
        grant = d.reserve(MoveId("r", epoch))
        assert isinstance(grant, Grant)
        for start in range(grant.have // 4 * 4, 12, 4):
            d.put(grant, start, start + 4)
        d.end.disown(grant.move, "the client has left", 0.0)
        assert isinstance(answer(d.commit(grant)), Cancel)
        assert d.available == 8 and d.manager.num_open_sequences == 0


def test_a_move_that_was_never_granted_can_be_cancelled() -> None:
    """vllm PR#18485: the clean-up asked for blocks that the request never had."""
    end = Endpoint(BlockManager(4, 4), hello("P", 4, 4), LIMITS)
    end.start(MOVE, "D", TOKENS, NAMING, "live", 0, 0.0)
    assert isinstance(end.cancel(MOVE, "aborted")[-1], Send)
    assert end.cancel(MOVE, "aborted") == []
    d = Receiving()
    d.end.disown(MOVE, "aborted", 0.0)
    assert isinstance(d.reserve(), Cancel)  # its abort has overtaken it


def test_a_reservation_that_does_not_fit_holds_nothing_back() -> None:
    """Avarok/atlas PR#373, vllm PR#18411: hits were kept when the rest could not be had."""
    d = Receiving(num_blocks=5)
    cached = d.manager.open(TOKENS[:8], *_naming())
    d.manager.reserve([cached], [8])
    d.manager.commit([cached], [TOKENS[:8]])
    d.manager.close(cached)
    other = d.manager.open([9] * 12)
    d.manager.reserve([other], [12])
    before = d.manager.snapshot()
    for _ in range(50):
        reserve = Reserve(*MOVE, pack_tokens(TOKENS), NAMING, 4)  # 2 hits, 2 blocks more
        assert isinstance(answer(d.end.handle("P", reserve, 0.0)), Deny)
    assert d.manager.snapshot() == before
    d.manager.close(other)
    grant = answer(d.end.handle("P", reserve, 0.0))
    assert isinstance(grant, Grant) and grant.have == 8 and d.manager.num_held_blocks == 4
    d.end.disown(MOVE, "over", 0.0)


def test_words_about_unknown_moves_change_nothing() -> None:
    """tenstorrent/vllm#145, vllm#2475, LMCache#3688: an abort of what is not there killed it."""
    d = Receiving()
    before = d.manager.snapshot()
    for _ in range(2):
        assert d.end.disown(MOVE, "aborted", 0.0) == []
        assert d.end.cancel(MOVE, "aborted") == []
        assert d.end.admitted(MOVE, 0.0) == []
        assert d.end.own(MOVE, 0.0) == [Abandoned(MOVE, "no complete copy of it is here")]
        for message in (Ack(*MOVE), Cancel(*MOVE, "no"), Deny(*MOVE, "no")):
            assert d.end.handle("P", message, 0.0) == []
        for message in (Grant(*MOVE, 1, 0), Nack(*MOVE, 1, 1, 0)):
            assert isinstance(answer(d.end.handle("P", message, 0.0)), Cancel)
    assert d.manager.snapshot() == before


def test_a_name_that_is_used_twice_leaves_its_first_user_alone() -> None:
    """vllm PR#49796: an id chosen twice took over the record of the blocks' owner."""
    d = Receiving()
    grant = d.reserve()
    held = d.manager.num_held_blocks
    denied = d.reserve(MOVE, "Q")
    assert isinstance(denied, Deny) and denied.retry_after is None
    assert "is being moved here by 'P'" in denied.reason
    foreign = Data(*MOVE, grant.lease, 1, 0, 4, pack_tokens(TOKENS[:4]), "float32")
    assert d.end.handle("Q", foreign, 0.0) == []
    assert d.manager.num_held_blocks == held
    d.put(grant, 0, 12)
    d.commit(grant)
    assert d.end.own(MOVE, 0.0)
    d.end.admitted(MOVE, 0.0)


@pytest.mark.parametrize("ack_first", [True, False])
def test_a_request_is_released_once(ack_first: bool) -> None:
    """TensorRT-LLM PR#12816: two paths freed one request."""
    world = World([hello("P", 20, 4), hello("D", 20, 4)])
    world.network.latency = 1 if ack_first else 6
    world.submit("r", "P", [1, 2, 3, 4, 5], 40)
    world.tick()
    world.move("r", "D", "prefilled")
    world.run()
    world.check_end()
    assert world.raised == ["r"] and not world.resumed


def test_a_message_that_cannot_be_read_is_told_and_not_published() -> None:
    """vllm PR#50754: one of N writes could not start, and the receiver went on counting."""
    d = Receiving()
    grant = d.reserve()
    d.put(grant, 0, 4)
    d.put(grant, 8, 12)
    assert isinstance(d.data(grant, 4, 8)[0], Write)
    nack = answer(d.end.written(MOVE, 6, 0.0))  # within the same step; half of it was good
    assert isinstance(nack, Nack) and nack.first_bad == 6
    late = answer(d.commit(grant))
    assert isinstance(late, Nack) and late.first_bad == 6
    d.end.disown(MOVE, "given up", 0.0)
    # What lies behind the gap is not to be found; what lies before it is.
    assert d.manager.match(TOKENS, *_naming()).cached_tokens == 6
    assert d.available == 8


def test_a_request_that_ends_with_its_first_token_is_not_moved() -> None:
    """vllm PR#46008: it ended, its K/V was not sent, and the decode side waited eight minutes."""
    world = World([hello("P", 20, 4), hello("D", 20, 4)])
    world.submit("r", "P", list(range(1, 20)), 1)
    world.tick()
    world.move("r", "D", "prefilled")
    world.run()
    world.check_end()
    assert world.ticks * TICK < LIMITS.lease and not world.raised


def test_an_abort_in_flight_ends_everywhere_and_is_no_other_end() -> None:
    """sglang#33507: an abort in flight was reported as a finished output."""
    for tick in range(2, 14):
        world = World([hello("P", 20, 4), hello("D", 20, 4)])
        world.submit("r", "P", list(range(1, 20)), 40)
        world.tick()
        world.move("r", "D", "live")
        while world.ticks < tick:
            world.tick()
        world.judge(world.fence.close("r"))
        delivered = list(world.delivered["r"])
        world.run()
        assert world.delivered["r"] == delivered and "r" not in world.ended
        assert world.ticks - tick < LIMITS.lease / TICK
        for worker in world.workers.values():
            assert worker.manager.num_held_blocks == 0 and not worker.payloads


def test_a_full_receiver_takes_the_second_request_later() -> None:
    """sglang#6857, PR#20371: out of memory after the transfer, and a retry without an end."""
    world = World([hello("P", 20, 4), hello("D", 4, 4)], chunk=9)
    for request in ("r", "s"):
        world.submit(request, "P", [ord(request)] * 9, 5)
    world.tick()
    for request in ("r", "s"):
        world.move(request, "D", "prefilled")
    world.run()
    world.check_end()
    assert "Deny" in world.network.kinds and sorted(world.raised) == ["r", "s"]


def test_a_dead_receiver_is_asked_a_bounded_number_of_times() -> None:
    """sglang#6857, PR#20371: retries without an end."""
    world = World([hello("P", 20, 4), hello("D", 20, 4)], deaths_are_told=False)
    world.kill("D")
    world.submit("r", "P", [1, 2, 3], 60)
    world.tick()
    world.move("r", "D", "prefilled")
    world.run()
    world.check_end()
    assert world.failed == [MOVE]
    most = LIMITS.patience / LIMITS.retry + LIMITS.patience / LIMITS.heartbeat
    assert world.network.count <= most + 2


@pytest.mark.parametrize("restarted", ["P", "D"])
@pytest.mark.parametrize("ticks", range(1, 12))
def test_a_peer_that_was_started_again_is_a_new_one(restarted: str, ticks: int) -> None:
    """vllm#49238: stale data of a peer's earlier start crashed or stalled the decode side."""
    world = World([hello("P", 20, 4), hello("D", 20, 4)], deaths_are_told=False)
    world.submit("r", "P", list(range(1, 20)), 40)
    world.tick()
    world.move("r", "D", "live")
    for _ in range(ticks):
        world.tick()
    world.restart(restarted)
    world.submit("s", "P", [3, 4, 5], 12)
    world.tick()
    world.move("s", "D", "live")
    world.run()
    world.check_end()


def test_the_receiver_computes_no_prompt_token_again() -> None:
    """vllm#26896: it computed the whole prompt, although the transfer had worked."""
    for length in range(4, 26):
        world = World([hello("P", 20, 4), hello("D", 20, 4)])
        world.submit("r", "P", list(range(1, length + 1)), 20)
        world.tick()
        world.move("r", "D", "prefilled")
        world.run()
        world.check_end()
        assert world.raised == ["r"]
        assert world.workers["P"].num_computed == length
        assert world.workers["D"].num_computed == 19  # each output but the last, once


def test_a_first_token_behind_full_blocks_takes_a_block_more() -> None:
    """vllm PR#50558: the decode side needs a block that the prefill side did not have."""
    p = BlockManager(8, 4)
    end = Endpoint(p, hello("P", 8, 4), LIMITS)
    d = Receiving()
    end.handle("D", hello("D", 8, 4), 0.0)
    prompt = TOKENS[:8]
    seq = p.open(prompt, *_naming())
    p.reserve([seq], [8])
    p.commit([seq], [prompt])
    (send,) = end.start(MOVE, "D", prompt, NAMING, "prefilled", 1, 0.0)
    assert isinstance(send, Send)
    grant = answer(d.end.handle("P", send.message, 0.0))
    assert d.manager.num_held_blocks == 3
    end.handle("D", grant, 0.0)
    sent = end.parked(MOVE, seq, b"state", (1,), (False,), 0.0)
    assert sum(len(a.blocks) for a in sent if not isinstance(a, Send)) == 2
    for action in sent:
        if not isinstance(action, Send):
            d.end.handle("P", action.data, 0.0)
            d.end.written(MOVE, None, 0.0)
        else:
            d.end.handle("P", action.message, 0.0)
    actions = d.end.own(MOVE, 0.0)
    assert end.handle("D", answer(actions), 0.0)[-1] == Released(MOVE)
    p.close(seq)
    known = [*prompt.tolist(), next_token(prompt.tolist())]
    moved = d.manager.open(known, *_naming())
    d.manager.reserve([moved], [1])
    assert d.manager.cached_tokens(moved) == 8 and len(d.manager.block_table(moved)) == 3
    d.manager.close(moved)
    d.end.admitted(MOVE, 0.0)


def test_outputs_are_those_of_the_undisturbed_run() -> None:
    """vllm#38606, #39146: short requests beside a large one got each other's K/V."""
    world = World([hello("P", 60, 4), hello("D", 70, 3)], chunk=5)
    prompts = {"a": [7] * 5, "b": [8] * 30, "c": [7] * 6, "d": [8] * 12}
    for request, prompt in prompts.items():
        world.submit(request, "P", prompt, 30)
    for request, mode in zip(prompts, ("live", "prefilled", "live", "live"), strict=True):
        world.tick()
        world.move(request, "D", mode)
    world.run()
    world.check_end()
    assert set(world.raised) == set(prompts)
    assert world.delivered["b"] == undisturbed(prompts["b"], 30)


def _naming() -> tuple[bytes | None, int, bytes | None]:
    return NAMING.namespace, NAMING.public, NAMING.extra
