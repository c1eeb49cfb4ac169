"""What a receiver does with each message, in each state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from moving_world import LIMITS, NAMING
from receiving import MOVE, TOKENS, Receiving, answer

from pagedkv.transfer.actions import Abandoned, Completed, Resumed, Write
from pagedkv.transfer.arrival import ReceiverState
from pagedkv.transfer.messages import (
    Ack,
    Cancel,
    Data,
    Deny,
    Grant,
    Hold,
    MoveId,
    Nack,
    Renew,
    Reserve,
    pack_tokens,
)


def complete(d: Receiving) -> Grant:
    """A move to `d` that only waits for the front end."""
    grant = d.reserve()
    d.put(grant, 0, 12)
    assert isinstance(d.commit(grant)[-1], Completed)
    return grant


def test_messages_that_come_again_change_nothing() -> None:
    d = Receiving()
    grant = d.reserve()
    assert d.reserve() == grant
    d.put(grant, 0, 8)
    before = d.manager.snapshot()
    assert answer(d.data(grant, 0, 8)) == Renew(*MOVE, grant.lease, 8)
    assert answer(d.data(grant, 4, 8)) == Renew(*MOVE, grant.lease, 8)
    assert d.manager.snapshot() == before
    d.put(grant, 8, 12)
    d.commit(grant)
    before = d.manager.snapshot()
    renewal = Renew(*MOVE, grant.lease, 12, complete=True)
    assert [answer(d.commit(grant)), answer(d.data(grant, 0, 8))] == [renewal, renewal]
    assert d.manager.snapshot() == before
    assert isinstance(d.end.own(MOVE, 0.0)[-1], Resumed)
    before = d.manager.snapshot()
    assert d.end.own(MOVE, 0.0) == []
    for again in (d.commit(grant), d.data(grant, 0, 8), d.end.handle("P", Hold(*MOVE, 1), 0.0)):
        assert answer(again) == Ack(*MOVE)
    assert d.manager.snapshot() == before
    d.end.admitted(MOVE, 0.0)
    assert answer(d.commit(grant)) == d.reserve() == Ack(*MOVE)


def test_payloads_may_come_in_any_order() -> None:
    d = Receiving()
    grant = d.reserve()
    for start in (8, 0, 4):
        d.put(grant, start, start + 4)
    assert isinstance(d.commit(grant)[-1], Completed)
    d.end.disown(MOVE, "over", 0.0)
    assert d.manager.match([*TOKENS, 1], *_naming()).cached_tokens == 12


def test_data_of_another_lease_is_not_looked_at() -> None:
    d = Receiving()
    grant = d.reserve()
    other = Data(*MOVE, grant.lease + 1, 1, 0, 4, pack_tokens(TOKENS[:4]), "float32")
    assert d.end.handle("P", other, 0.0) == []
    assert d.end.receiver.state(MOVE) is ReceiverState.RESERVED
    d.end.disown(MOVE, "over", 0.0)


def test_data_of_other_tokens_ends_the_move() -> None:
    d = Receiving()
    grant = d.reserve()
    data = Data(*MOVE, grant.lease, 1, 0, 4, pack_tokens(TOKENS[4:8]), "float32")
    actions = d.end.handle("P", data, 0.0)
    assert isinstance(answer(actions), Cancel)
    assert actions[-1] == Abandoned(MOVE, "tokens [0, 4) are not those known")
    assert d.available == 8 and d.manager.match(TOKENS, *_naming()).cached_tokens == 0


@pytest.mark.parametrize(
    ("start", "stop", "tokens"),
    [
        (0, 4, b"abc"),  # no int32
        (0, 4, pack_tokens(TOKENS[:3])),
        (4, 4, b""),
        (-4, 0, pack_tokens(TOKENS[:4])),
        (12, 16, pack_tokens(-TOKENS[:4])),  # no ids
    ],
)
def test_malformed_data_ends_the_move_alone(start: int, stop: int, tokens: bytes) -> None:
    d = Receiving()
    grant = d.reserve()
    d.put(grant, 0, 12)
    actions = d.end.handle("P", Data(*MOVE, grant.lease, 1, start, stop, tokens, "float32"), 0.0)
    assert isinstance(answer(actions), Cancel)
    assert actions[-1] == Abandoned(MOVE, f"data of tokens [{start}, {stop}) is malformed")
    assert d.available == 8


def test_an_end_as_owner_is_not_forgotten_when_the_request_has_moved_on() -> None:
    """Its sender may not have heard that it was taken: it must not go on with the request."""
    d = Receiving()
    grant = complete(d)
    d.end.own(MOVE, 0.0)
    d.end.admitted(MOVE, 0.0)
    d.end.disown(MOVE, "it has another owner", 0.0)
    assert answer(d.commit(grant)) == Ack(*MOVE)


def test_a_sequence_grows_beyond_what_was_reserved() -> None:
    d = Receiving()
    grant = d.reserve()
    d.put(grant, 0, 12)
    tokens = np.arange(1, 31, dtype=np.int32)

    def more(start: int, stop: int) -> Data:
        return Data(*MOVE, grant.lease, stop, start, stop, pack_tokens(tokens[start:stop]), "f")

    gap = answer(d.end.handle("P", more(16, 20), 0.0))  # not even its ids are known before it
    assert isinstance(gap, Nack) and gap.first_bad == 12
    (write,) = d.end.handle("P", more(12, 20), 0.0)
    assert isinstance(write, Write) and len(write.slots) == 8
    assert answer(d.end.written(MOVE, None, 0.0)) == Renew(*MOVE, grant.lease, 20)
    assert d.manager.num_held_blocks == 5
    taken = d.manager.open([9] * 12)
    d.manager.reserve([taken], [12])  # all the room that is left
    actions = d.end.handle("P", more(20, 30), 0.0)
    assert isinstance(answer(actions), Cancel) and isinstance(actions[-1], Abandoned)
    assert d.manager.match(tokens, *_naming()).cached_tokens == 20
    d.manager.close(taken)


def test_a_complete_copy_is_the_front_ends_to_decide_on() -> None:
    """The sender may be gone, or have gone on by itself: its copy there is another epoch's."""
    d = Receiving()
    complete(d)
    assert d.end.handle("P", Cancel(*MOVE, "it took too long"), 0.0) == []
    assert d.end.peer_gone("P", 0.0) == []
    assert isinstance(d.end.own(MOVE, 0.0)[-1], Resumed)
    d.end.admitted(MOVE, 0.0)


def test_room_for_samples_that_brought_nothing_is_free_when_all_is_there() -> None:
    """Not only when the front end has answered: other moves may take it meanwhile."""
    d = Receiving()
    grant = answer(d.end.handle("P", Reserve(*MOVE, pack_tokens(TOKENS), NAMING, 4, (0, 0)), 0.0))
    assert isinstance(grant, Grant) and grant.parts
    assert (d.manager.num_open_sequences, d.manager.num_held_blocks) == (3, 5)
    d.put(grant, 0, 12)
    d.commit(grant)
    assert d.end.receiver.state(MOVE) is ReceiverState.COMPLETE
    assert (d.manager.num_open_sequences, d.manager.num_held_blocks) == (1, 3)
    other = MoveId("s", 1)
    more = Reserve(*other, pack_tokens(TOKENS + 100), NAMING, 8)
    assert isinstance(answer(d.end.handle("P", more, 0.0)), Grant)
    d.end.disown(other, "over", 0.0)
    d.end.own(MOVE, 0.0)
    d.end.admitted(MOVE, 0.0)
    assert d.available == 8


def test_a_front_end_that_does_not_answer_is_not_waited_for_for_ever() -> None:
    d = Receiving()
    complete(d)
    now = 0.0
    while MOVE in d.end.receiver:  # whatever the sender says
        now += LIMITS.lease / 2
        assert now <= LIMITS.patience
        d.end.handle("P", Hold(*MOVE, 1), now)
        d.end.tick(now)
    assert d.available == 8
    assert d.end.own(MOVE, now) == [Abandoned(MOVE, "no complete copy of it is here")]


def test_what_is_owned_stays_until_the_scheduler_has_it_but_not_for_ever() -> None:
    d = Receiving()
    complete(d)
    d.end.own(MOVE, 0.0)
    assert d.manager.num_draining_blocks == 3 and d.manager.num_open_sequences == 0
    assert len(d.manager.evict(8)) == 0
    d.end.tick(LIMITS.lease - 0.1)
    assert d.manager.num_draining_blocks == 3
    d.end.tick(LIMITS.lease)
    assert d.manager.num_draining_blocks == 0 and MOVE not in d.end.receiver


def test_a_receiver_keeps_room_for_what_it_runs() -> None:
    d = Receiving(limits=replace(LIMITS, spare_blocks=3))
    running = d.manager.open([9] * 12)
    d.manager.reserve([running], [12])
    denied = d.reserve()  # 3 blocks of the 5 that are left
    assert isinstance(denied, Deny) and denied.retry_after == LIMITS.retry
    d.manager.close(running)
    assert isinstance(d.reserve(), Grant)  # nothing runs: there is nothing to keep room for
    d.end.disown(MOVE, "over", 0.0)


def test_what_can_never_fit_is_refused_for_good() -> None:
    d = Receiving()
    for tokens, headroom, naming in (
        (TOKENS, 24, NAMING),
        (TOKENS[:0], 1, NAMING),
        (TOKENS, -1, NAMING),
        (-TOKENS, 99, NAMING),
    ):
        reserve = Reserve(*MOVE, pack_tokens(tokens), naming, headroom)
        denied = answer(d.end.handle("P", reserve, 0.0))
        assert isinstance(denied, Deny) and denied.retry_after is None
    broken = Reserve(*MOVE, b"abc", NAMING)
    assert "no int32 tokens" in answer(d.end.handle("P", broken, 0.0)).reason
    assert not d.end.receiver.moves and d.available == 8


def test_tenants_do_not_share_what_was_moved() -> None:
    d = Receiving()
    complete(d)
    d.end.disown(MOVE, "over", 0.0)
    assert d.manager.match(TOKENS, *_naming()).cached_tokens == 11
    assert d.manager.match(TOKENS, b"another tenant").cached_tokens == 0
    assert d.reserve(MoveId("s", 1)).have == 11
    d.end.disown(MoveId("s", 1), "over", 0.0)


def test_a_write_is_answered_before_the_next_message() -> None:
    d = Receiving()
    grant = d.reserve()
    d.data(grant, 0, 4)
    with pytest.raises(ValueError, match="call `written` first"):
        d.data(grant, 4, 8)
    d.end.written(MOVE, None, 0.0)
    with pytest.raises(ValueError, match="nothing is being written"):
        d.end.written(MOVE, None, 0.0)
    d.end.disown(MOVE, "over", 0.0)


def test_ends_are_remembered_for_a_while_only() -> None:
    d = Receiving()
    for epoch in range(50):
        d.end.disown(MoveId("r", epoch), "over", epoch * 10.0)
        d.end.tick(epoch * 10.0)
        assert isinstance(d.reserve(MoveId("r", epoch), now=epoch * 10.0), Cancel)
    late = 49 * 10.0
    remembered = [epoch for epoch in range(50) if _is_remembered(d, MoveId("r", epoch), late)]
    assert remembered == [46, 47, 48, 49]  # those of the last 40 seconds


def _is_remembered(d: Receiving, move: MoveId, now: float) -> bool:
    answered = d.reserve(move, now=now)
    if isinstance(answered, Grant):
        d.end.disown(move, "over", now)
    return isinstance(answered, Cancel)


def _naming() -> tuple[bytes | None, int, bytes | None]:
    return NAMING.namespace, NAMING.public, NAMING.extra
