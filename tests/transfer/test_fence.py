"""Who owns a request, and which tokens are delivered."""

from __future__ import annotations

import pytest

from pagedkv.transfer.fence import Disowned, Fence, Orphaned, Owner, Raised
from pagedkv.transfer.messages import MoveId


def moving(samples: int = 1) -> tuple[Fence, MoveId, MoveId]:
    """A fence with request "r" at P, and a move to D."""
    fence = Fence()
    old = fence.open("r", "P", samples)
    return fence, old, fence.begin_move("r", "D")


def test_the_epoch_is_raised_once_and_then_only_the_new_owner_is_heard() -> None:
    fence, old, new = moving()
    assert fence.deliver(old, 0, (5,)) == ((5,), False, [])
    raised = Raised("r", Owner("P", 0), Owner("D", 1))
    assert fence.complete(new, (1,), (False,)) == [raised]
    assert fence.complete(new, (1,), (False,)) == []
    assert fence.owner("r") == Owner("D", 1)
    assert fence.deliver(old, 0, (6,)) == ((), False, [])
    assert fence.deliver(new, 0, (7,)) == ((7,), False, [])
    assert fence.delivered("r") == ((5, 7),)


def test_ownership_waits_for_the_old_owners_last_tokens() -> None:
    fence, old, new = moving()
    assert fence.complete(new, (2,), (False,)) == []
    assert fence.deliver(new, 0, (9,)) == ((), False, [])
    assert fence.deliver(old, 0, (5,)) == ((5,), False, [])
    tokens, ended, verdicts = fence.deliver(old, 0, (6,))
    assert (tokens, ended) == ((6,), False)
    assert verdicts == [Raised("r", Owner("P", 0), Owner("D", 1))]


def test_a_copy_that_is_behind_what_was_delivered_is_disowned() -> None:
    """The sender gave up waiting and went on."""
    fence, old, new = moving()
    fence.deliver(old, 0, (5, 6))
    assert fence.complete(new, (1,), (False,)) == [Disowned("r", Owner("D", 1))]
    assert fence.owner("r") == Owner("P", 0)


def test_every_sample_has_to_be_caught_up_with() -> None:
    fence, old, new = moving(samples=2)
    fence.deliver(old, 1, (5,))
    assert fence.complete(new, (1, 1), (False, False)) == []
    assert fence.deliver(old, 0, (4,))[2] == [Raised("r", Owner("P", 0), Owner("D", 1))]


def test_a_sample_that_ended_at_the_old_owner_is_heard_to_end() -> None:
    """The new owner would not say it again."""
    fence, old, new = moving(samples=2)
    fence.deliver(old, 0, (4,))
    fence.deliver(old, 1, (5,))
    assert fence.complete(new, (1, 1), (True, False)) == []
    tokens, ended, verdicts = fence.deliver(old, 0, (), ended=True)
    assert (tokens, ended) == ((), True)
    assert verdicts == [Raised("r", Owner("P", 0), Owner("D", 1))]


def test_an_end_that_the_copy_does_not_know_of_makes_it_useless() -> None:
    fence, old, new = moving()
    fence.deliver(old, 0, (4,), ended=True)
    assert fence.complete(new, (1,), (False,)) == [Disowned("r", Owner("D", 1))]


def test_only_the_next_token_is_delivered() -> None:
    fence, old, _ = moving()
    assert fence.deliver(old, 0, (5, 6), first=0) == ((5, 6), False, [])
    assert fence.deliver(old, 0, (5, 6), first=0) == ((), False, [])
    assert fence.deliver(old, 0, (6, 7), first=1) == ((7,), False, [])
    assert fence.deliver(old, 0, (9,), first=4) == ((), False, [])
    assert fence.delivered("r") == ((5, 6, 7),)


def test_the_owners_death_orphans_a_request_and_its_copies() -> None:
    fence, old, new = moving()
    fence.deliver(old, 0, (5,))
    fence.complete(new, (2,), (False,))  # the second token is lost with the old owner
    orphaned = Orphaned("r", ((5,),), (False,))
    assert fence.worker_lost("P") == [Disowned("r", Owner("D", 1)), orphaned]
    assert fence.owner("r") is None
    again = fence.resume("r", "D")
    assert again == MoveId("r", 2)
    assert fence.deliver(old, 0, (6,)) == ((), False, [])
    assert fence.deliver(new, 0, (6,)) == ((), False, [])
    assert fence.deliver(again, 0, (6,)) == ((6,), False, [])
    with pytest.raises(ValueError, match="has an owner"):
        fence.resume("r", "P")


def test_the_death_of_a_receiver_takes_its_copies_alone() -> None:
    fence, old, new = moving()
    assert fence.worker_lost("D") == []
    assert fence.complete(new, (0,), (False,)) == []
    assert fence.deliver(old, 0, (5,)) == ((5,), False, [])


def test_a_failed_move_leaves_the_owner_and_a_failed_owner_leaves_an_orphan() -> None:
    fence, _, new = moving()
    assert fence.move_failed(new, "P") == [Disowned("r", Owner("D", 1))]
    assert fence.complete(new, (0,), (False,)) == []
    assert fence.owner("r") == Owner("P", 0)
    newer = fence.begin_move("r", "D")
    assert newer == MoveId("r", 2)
    fence.complete(newer, (0,), (False,))
    # The sender reports a failure that it saw before it heard of the new owner.
    assert fence.move_failed(newer, "P") == []
    assert fence.move_failed(newer, "D") == [Orphaned("r", ((),), (False,))]


def test_closing_tells_all_who_have_of_the_request() -> None:
    fence, old, new = moving()
    assert fence.close("r") == [Disowned("r", Owner("D", 1)), Disowned("r", Owner("P", 0))]
    assert fence.close("r") == []
    assert fence.deliver(old, 0, (5,)) == ((), False, [])
    assert fence.complete(new, (0,), (False,)) == []
    assert fence.move_failed(new, "D") == []


def test_an_id_is_open_once() -> None:
    fence, _, _ = moving()
    with pytest.raises(ValueError, match="open already"):
        fence.open("r", "D")
    assert fence.requests_of("P") == ["r"] and fence.requests_of("D") == []


def test_a_copy_of_another_number_of_samples_is_disowned() -> None:
    fence, _, new = moving(samples=2)
    assert fence.complete(new, (1,), (False,)) == [Disowned("r", Owner("D", 1))]
