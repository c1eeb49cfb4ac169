"""What a sender does with each message, and with silence, in each state."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from moving_world import LIMITS, NAMING, hello

from pagedkv.cache import BlockManager, SeqId
from pagedkv.transfer.actions import Action, Free, Reclaimed, Released, Send, SendData
from pagedkv.transfer.departure import SenderState
from pagedkv.transfer.endpoint import Endpoint
from pagedkv.transfer.messages import (
    Ack,
    Cancel,
    Commit,
    Deny,
    Grant,
    Hold,
    MoveId,
    Nack,
    Renew,
    Reserve,
)

MOVE = MoveId("r", 1)
TOKENS = np.arange(1, 43, dtype=np.int32)


class Sending:
    """A worker P with a request of 42 tokens in blocks of 4, and a worker D that is asked."""

    def __init__(self, mode: str = "prefilled") -> None:
        self.manager = BlockManager(20, 4)
        self.end = Endpoint(self.manager, hello("P", 20, 4), LIMITS)
        self.end.handle("D", hello("D", 20, 4), 0.0)
        self.seq: SeqId = self.manager.open(TOKENS)
        self.manager.reserve([self.seq], [42])
        self.manager.commit([self.seq], [TOKENS])
        (asked,) = self.end.start(MOVE, "D", TOKENS, NAMING, mode, 0, 0.0)
        assert isinstance(asked, Send) and isinstance(asked.message, Reserve)

    def hear(self, message: object, now: float = 0.0) -> list[Action]:
        return self.end.handle("D", message, now)

    def ranges(self, now: float = 0.0) -> list[tuple[int, int]]:
        """Tokens that `progress` sends."""
        sent = self.end.progress(MOVE, self.seq, now)
        return [(a.data.start, a.data.stop) for a in sent if isinstance(a, SendData)]

    def park(self, now: float = 0.0) -> list[Action]:
        return self.end.parked(MOVE, self.seq, b"state", (1,), (False,), now)


@pytest.fixture
def p() -> Iterator[Sending]:
    sending = Sending()
    yield sending
    sending.manager.close(sending.seq)


def test_no_more_is_under_way_than_the_window_allows(p: Sending) -> None:
    """Pieces of two blocks, two at a time; the partly filled block when the request stands."""
    assert p.ranges() == []  # nothing is granted yet
    p.hear(Grant(*MOVE, 7, 9))
    assert p.ranges() == [(8, 16), (16, 24)]
    assert p.ranges() == []
    assert p.hear(Renew(*MOVE, 7, 16)) == [Free(MOVE, 1)]
    assert p.ranges() == [(24, 32)]
    assert p.hear(Renew(*MOVE, 7, 32)) == [Free(MOVE, 3)]
    assert p.ranges() == [(32, 40)]
    last, commit = p.park()
    assert isinstance(last, SendData) and (last.data.start, last.data.stop) == (40, 42)
    assert isinstance(commit, Send) and isinstance(commit.message, Commit)
    assert commit.message.total == 42 and p.end.sender.state(MOVE) is SenderState.READY
    assert p.hear(Ack(*MOVE)) == [Free(MOVE, 6), Released(MOVE)]


def test_answers_that_come_again_or_late_change_nothing(p: Sending) -> None:
    p.hear(Grant(*MOVE, 7, 0))
    p.ranges()
    p.hear(Grant(*MOVE, 8, 40))
    assert p.hear(Nack(*MOVE, 7, 2, 12)) == [] and p.ranges() == [(12, 20), (20, 28)]
    p.hear(Renew(*MOVE, 7, 16))
    for late in (Nack(*MOVE, 7, 2, 12), Nack(*MOVE, 7, 1, 4), Nack(*MOVE, 8, 9, 16)):
        assert p.hear(late) == []
    p.hear(Renew(*MOVE, 7, 8))
    p.hear(Renew(*MOVE, 8, 40))
    p.hear(Deny(*MOVE, "too late"))
    p.end.handle("X", Cancel(*MOVE, "of another worker"), 0.0)
    assert p.hear(Ack(*MOVE)) == []  # of nothing that was committed
    p.hear(Renew(*MOVE, 7, 20))
    assert p.ranges() == [(28, 36)]


def test_a_silent_receiver_is_given_up(p: Sending) -> None:
    """While nothing is under way, as during a long prompt; and when all has been taken."""
    p.hear(Grant(*MOVE, 7, 40))
    assert not any(isinstance(a, Reclaimed) for a in p.end.tick(LIMITS.lease - 0.1))
    cancel, _, reclaimed = p.end.tick(LIMITS.lease)
    assert isinstance(cancel, Send) and isinstance(cancel.message, Cancel)
    assert reclaimed == Reclaimed(MOVE, "nothing was heard of 'D' for 4.0 s")
    assert MOVE not in p.end.sender


def test_a_receiver_that_has_taken_all_is_waited_for_while_it_lives(p: Sending) -> None:
    p.hear(Grant(*MOVE, 7, 40))
    p.park()
    now = 0.0
    for _ in range(20):
        now += LIMITS.lease / 2
        p.hear(Renew(*MOVE, 7, 42, complete=True), now)
        sent = [a.message for a in p.end.tick(now) if isinstance(a, Send)]
        assert all(isinstance(message, Hold) for message in sent) and p.ranges(now) == []
    now += LIMITS.lease
    assert any(isinstance(a, Reclaimed) for a in p.end.tick(now))


def test_failures_in_a_row_end_a_move(p: Sending) -> None:
    p.hear(Grant(*MOVE, 7, 0))
    number = 0
    for _ in range(LIMITS.retries):
        number += len(p.ranges())
        assert p.hear(Nack(*MOVE, 7, number, 0)) == []
    number += len(p.ranges())
    assert p.hear(Nack(*MOVE, 7, number, 0))[-1] == Reclaimed(
        MOVE, "token 0 did not arrive whole, 5 times in a row"
    )


def test_progress_forgives_failures(p: Sending) -> None:
    p.hear(Grant(*MOVE, 7, 0))
    number = 0
    for have in range(4, 40, 4):
        number += len(p.ranges())
        p.hear(Renew(*MOVE, 7, have))
        p.hear(Nack(*MOVE, 7, number, have))
    assert MOVE in p.end.sender


def test_what_waits_for_room_asks_again_when_it_may(p: Sending) -> None:
    p.hear(Deny(*MOVE, "full", retry_after=2.5))
    assert not any(_reserves(p.end.tick(now)) for now in (1.0, 2.0))
    assert _reserves(p.end.tick(2.5)) == 1
    now = 2.5
    while MOVE in p.end.sender:
        now += 1.0
        p.hear(Deny(*MOVE, "full", retry_after=1.0), now)
        p.end.tick(now)
    assert LIMITS.patience <= now < LIMITS.patience + 1


def test_a_request_is_moved_once_at_a_time(p: Sending) -> None:
    with pytest.raises(ValueError, match="is under way already"):
        p.end.start(MOVE, "D", TOKENS, NAMING, "live", 0, 0.0)
    with pytest.raises(ValueError, match="mode='both'"):
        p.end.start(MoveId("r", 2), "D", TOKENS, NAMING, "both", 0, 0.0)
    p.hear(Grant(*MOVE, 7, 0))
    p.park()
    with pytest.raises(ValueError, match="parked already"):
        p.park()
    newer = MoveId("r", 3)
    actions = p.end.start(newer, "D", TOKENS, NAMING, "live", 0, 0.0)
    assert Reclaimed(MOVE, "a newer move of the request has begun") in actions
    assert p.end.sender.moves == [newer] and _reserves(actions) == 1
    assert p.end.start(MoveId("r", 2), "D", TOKENS, NAMING, "live", 0, 0.0) == [
        Reclaimed(MoveId("r", 2), "a newer move of the request is under way")
    ]


def _reserves(actions: list[Action]) -> int:
    return sum(isinstance(a, Send) and isinstance(a.message, Reserve) for a in actions)
