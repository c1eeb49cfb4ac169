"""Who has which request: placed, moved, lost, resumed; no process, no clock."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from pagedkv.cluster.applied import Applied
from pagedkv.cluster.dispatch import MOST_LOSSES, Dispatch
from pagedkv.cluster.outcome import Outcome
from pagedkv.engine.wire import Complete, Disown, Move, MoveFailed, Own
from pagedkv.scheduling.messages import Abort, Add, Delta, Drawn, Resume
from pagedkv.scheduling.params import BeamSearchParams, SamplingParams


def add(name: str = "r", n: int = 1) -> Add:
    return Add(name, (1, 2, 3), SamplingParams(n=n, max_tokens=8), arrival=0.0, seed=7)


def dispatch(*requests: Add) -> Dispatch:
    made = Dispatch(itertools.count(1.0).__next__)
    for request in requests:
        assert made.add(request).unplaced == [request.request_id]
    return made


def bring(made: Dispatch, owned_id: str, *tokens: int, sample: int = 0, end: str | None = None):
    return made.take([Delta(owned_id, sample, tokens, (None,) * len(tokens), finish_reason=end)])


def test_a_request_goes_to_a_worker_and_comes_back_under_its_own_id() -> None:
    made = dispatch(add())
    [(worker, sent)] = made.place("r", "a").sends
    assert worker == "a" and isinstance(sent, Add) and sent.request_id == "r@0"
    assert made.place("r", "b") == Outcome([], [], [], [])
    [delta] = bring(made, "r@0", 5).deltas
    assert (delta.request_id, delta.token_ids) == ("r", (5,))
    assert bring(made, "r@0", 6, end="stop").closed == ["r"]
    assert "r" not in made and bring(made, "r@0", 7).deltas == []


def test_nothing_is_delivered_of_a_sample_that_has_ended() -> None:
    made = dispatch(add(n=2))
    made.place("r", "a")
    assert len(bring(made, "r@0", 5, end="stop").deltas) == 1
    assert bring(made, "r@0", 6).deltas == []
    assert bring(made, "r@0", end="length").deltas == []
    assert bring(made, "r@0", 7, sample=1, end="stop").closed == ["r"]


def test_what_a_dead_worker_had_goes_on_elsewhere_behind_what_was_delivered() -> None:
    made = dispatch(add(n=2))
    made.place("r", "a")
    bring(made, "r@0", 5)
    bring(made, "r@0", 6, sample=1, end="stop")
    assert made.lose("a", "killed").unplaced == ["r"]
    assert made.wanted("r")[1] == (5,)
    [(worker, sent)] = made.place("r", "b").sends
    assert worker == "b" and isinstance(sent, Resume) and sent.request_id == "r@1"
    assert sent.outputs == (Drawn((5,)), Drawn((6,), "stop"))
    assert bring(made, "r@0", 9).deltas == []  # the former owner, late
    outcome = bring(made, "r@1", 7, end="length")
    assert [delta.token_ids for delta in outcome.deltas] == [(7,)] and outcome.closed == ["r"]


def test_a_request_that_loses_worker_after_worker_ends_with_the_reason() -> None:
    made = dispatch(add(n=2))
    for i in range(MOST_LOSSES):
        made.place("r", f"w{i}")
        outcome = made.lose(f"w{i}", "signal 9")
    assert [(d.sample, d.finish_reason) for d in outcome.deltas] == [(0, "error"), (1, "error")]
    assert "4 workers" in str(outcome.deltas[0].error) and "signal 9" in str(
        outcome.deltas[0].error
    )
    assert outcome.closed == ["r"] and outcome.deltas[-1].usage is not None


def test_ownership_moves_when_all_that_the_old_owner_reported_is_delivered() -> None:
    made = dispatch(add())
    sends = made.place("r", "p", then="d").sends
    assert sends[1] == ("p", Move("r", 1, "d", "prefilled"))
    assert made.complete(Complete("r", 1, (1,), (False,))).sends == []  # a token is on its way
    outcome = bring(made, "r@0", 5)
    assert outcome.sends == [("d", Own("r", 1)), ("p", Disown("r", 0))]
    assert bring(made, "r@0", 6).deltas == [] and len(bring(made, "r@1", 6).deltas) == 1
    assert made.of("d") == ["r"] and made.of("p") == []


def test_a_request_for_one_token_stays_where_its_prompt_is_computed() -> None:
    one = replace(add(), params=SamplingParams(max_tokens=1))
    (sent,) = dispatch(one).place("r", "p", then="d").sends
    assert sent[0] == "p" and isinstance(sent[1], Add)


def test_a_move_that_fails_leaves_the_request_where_it_is_to_be_moved_later() -> None:
    made = dispatch(add())
    made.place("r", "p", then="d")
    bring(made, "r@0", 5)
    assert made.settled("p") == []
    made.fail_move("p", MoveFailed("r", 1, "no room"))
    assert made.settled("p") == ["r"]
    assert made.move_away("r", "d").sends == [("p", Move("r", 2, "d", "live"))]
    assert made.move_away("r", "d").sends == []  # one at a time
    assert made.lose("d", "killed").unplaced == [] and made.settled("p") == ["r"]


def test_the_owner_dies_before_its_last_token_has_come_and_the_copy_is_given_up() -> None:
    made = dispatch(add())
    made.place("r", "p", then="d")
    made.complete(Complete("r", 1, (1,), (False,)))
    outcome = made.lose("p", "killed")
    assert outcome.sends == [("d", Disown("r", 1))] and outcome.unplaced == ["r"]
    [(_, sent)] = made.place("r", "d").sends
    assert isinstance(sent, Resume) and sent.request_id == "r@2"


def test_a_deadline_counts_while_no_worker_has_the_request() -> None:
    """A worker looks at those of its own."""
    now = 0.0
    made = Dispatch(lambda: now)
    for name, deadline in (("soon", 5.0), ("later", 9.0), ("there", 5.0), ("never", None)):
        made.add(replace(add(name, n=2), deadline=deadline))
    made.place("there", "a")
    now = 5.0
    assert made.expire() == Outcome([], [], [], [])
    now = 5.1
    outcome = made.expire()
    assert [(d.request_id, d.sample, d.finish_reason, d.error_type) for d in outcome.deltas] == [
        ("soon", i, "deadline", "deadline") for i in range(2)
    ]
    assert outcome.closed == ["soon"] and made.unplaced == ["later", "never"]
    bring(made, "there@0", 5)
    made.lose("a", "killed")
    assert made.expire().closed == ["there"]


def test_an_abort_follows_the_request() -> None:
    made = dispatch(add(n=2))
    made.place("r", "a")
    bring(made, "r@0", 5)
    stop = Abort("r", 0, reason="stop")
    assert made.abort(stop).sends == [("a", Abort("r@0", 0, reason="stop"))]
    outcome = made.lose("a", "killed")  # it has not answered
    assert [(d.sample, d.finish_reason) for d in outcome.deltas] == [(0, "stop")]
    [(_, sent)] = made.place("r", "b").sends
    assert isinstance(sent, Resume) and sent.outputs[0].finish_reason == "stop"
    assert made.abort(Abort("r")).sends == [("b", Abort("r@1"))]


@pytest.mark.parametrize("had", [False, True])
def test_an_abort_of_what_nobody_has_ends_it_at_once(had: bool) -> None:
    made = dispatch(add())
    if had:
        made.place("r", "a")
        made.lose("a", "killed")
    outcome = made.abort(Abort("r"))
    assert [d.finish_reason for d in outcome.deltas] == ["abort"] and outcome.closed == ["r"]
    assert made.place("r", "b").sends == [] and made.abort(Abort("r")).deltas == []


@pytest.mark.parametrize("had", [False, True])
def test_a_sample_that_ends_while_nobody_has_the_request_is_over_wherever_it_goes(
    had: bool,
) -> None:
    made = dispatch(add(n=2))
    if had:
        made.place("r", "a")
        made.lose("a", "killed")
    (end,) = made.abort(Abort("r", 1)).deltas
    assert (end.sample, end.finish_reason) == (1, "abort")
    (_, sent), (_, move) = made.place("r", "p", then="d").sends
    assert isinstance(sent, Resume) and sent.outputs == (Drawn(), Drawn((), "abort"))
    bring(made, sent.request_id, 5)
    outcome = made.complete(Complete("r", move.epoch, (1, 0), (False, True)))
    assert [worker for worker, _ in outcome.sends] == ["d", "p"]  # own, disown


def test_beams_end_together_where_nobody_has_them() -> None:
    beam = BeamSearchParams(2, 4)
    made = dispatch(replace(add(), params=beam.sampling, beam=beam))
    outcome = made.abort(Abort("r", 1))
    assert [d.sample for d in outcome.deltas] == [0, 1] and outcome.closed == ["r"]


def test_a_stop_string_is_told_to_the_new_owner() -> None:
    made = dispatch(add())
    made.place("r", "p", then="d")
    bring(made, "r@0", 5)
    made.abort(Abort("r", 0, reason="stop"))
    sends = made.complete(Complete("r", 1, (1,), (False,))).sends
    assert ("d", Abort("r@1", 0, reason="stop")) in sends


def test_a_request_that_ends_takes_its_copies_with_it() -> None:
    made = dispatch(add())
    made.place("r", "p", then="d")
    outcome = bring(made, "r@0", 5, end="length")
    assert outcome.sends == [("d", Disown("r", 1))] and outcome.closed == ["r"]
    assert made.complete(Complete("r", 1, (1,), (True,))).sends == []


def test_messages_count_as_taken_in_the_order_in_which_they_were_sent() -> None:
    applied = Applied()
    first, second = applied.begin(), applied.begin()
    applied.sent("b", second)
    applied.done(second)
    applied.taken("b", 1)
    assert applied.count == 0  # the first has no worker yet
    applied.sent("a", first)
    applied.done(first)
    assert applied.count == 0
    applied.lost("a")
    assert applied.count == 2
    applied.sent("a", None)  # a copy of something, under a new process
    third = applied.begin()
    applied.sent("a", third)
    applied.done(third)
    applied.taken("a", 1)
    assert applied.count == 2
    applied.taken("a", 2)
    assert applied.count == 3


def test_a_request_was_admitted_once_wherever_it_goes() -> None:
    """A worker on another host knows when by its age, and later by what the way took."""
    made = dispatch(add())
    made.place("r", "a")
    made.take([Delta("r@0", 0, (5,), (None,), admitted_at=2.0)])
    made.lose("a", "killed")
    made.place("r", "b")
    [delta] = made.take([Delta("r@1", 0, (6,), (None,), admitted_at=2.5)]).deltas
    assert delta.admitted_at == 2.0


def test_a_move_counts_once_as_done_or_failed() -> None:
    made = dispatch(add("r"), add("s"), add("t"), add("u"))
    for name in "rstu":
        made.place(name, "p", then="d")
        bring(made, f"{name}@0", 5)
    made.complete(Complete("r", 1, (1,), (False,)))
    for worker in "pd":  # both sides say so
        made.fail_move(worker, MoveFailed("s", 1, "no room"))
    bring(made, "t@0", 6, end="stop")
    made.fail_move("d", MoveFailed("t", 1, "the request has ended"))
    assert (made.tally.moves_done, made.tally.moves_failed) == (1, 1)
    made.lose("d", "killed")  # it owned r, and u was on its way there
    made.fail_move("p", MoveFailed("u", 1, "d is gone"))
    assert (made.tally.moves_done, made.tally.moves_failed) == (1, 2)
    made.place("r", "p", then="e")
    made.lose("p", "killed")
    assert (made.tally.moves_failed, made.tally.resumed) == (3, 1)


def clocked(*requests: Add) -> tuple[Dispatch, list[float]]:
    """All of them decode at worker p. The clock shows what is last in the list."""
    times = [0.0]
    made = Dispatch(lambda: times[-1])
    for request in requests:
        made.add(request)
        made.place(request.request_id, "p")
        bring(made, f"{request.request_id}@0", 5)
    return made, times


def test_a_move_that_fails_is_tried_again_ever_later() -> None:
    made, times = clocked(add())
    tried = []
    while times[-1] < 200:
        for _, move in made.empty("p", ["d"]).sends:
            assert isinstance(move, Move)
            tried.append(times[-1])
            made.fail_move("p", MoveFailed("r", move.epoch, "no room"))
        times.append(times[-1] + 0.25)
    pauses = [after - before for before, after in itertools.pairwise(tried)]
    assert pauses == [1, 2, 4, 8, 16, 32, 32, 32, 32, 32]


def test_one_that_has_moved_is_moved_on_at_once() -> None:
    made, _ = clocked(add())
    [(_, first)] = made.empty("p", ["d"]).sends
    made.fail_move("p", MoveFailed("r", first.epoch, "no room"))
    assert made.empty("p", ["d"]).sends == [] and made.stuck("p") is not None
    [(_, second)] = made.move_away("r", "d").sends
    made.complete(Complete("r", second.epoch, (1,), (False,)))
    assert made.of("d") == ["r"] and made.stuck("d") is None
    assert [type(message) for _, message in made.empty("d", ["p"]).sends] == [Move]


def test_a_worker_that_did_not_take_a_request_is_asked_last() -> None:
    made, times = clocked(add())
    [(_, first)] = made.empty("p", ["d", "e"]).sends
    made.fail_move("p", MoveFailed("r", first.epoch, "no room"))
    times.append(9.0)
    [(_, second)] = made.empty("p", ["d", "e"]).sends
    assert [first.to, second.to] == ["d", "e"]
    made.fail_move("p", MoveFailed("r", second.epoch, "no room either"))
    times.append(19.0)
    assert made.empty("p", ["e"]).sends[0][1].to == "e"  # there is no other


def test_what_keeps_requests_where_they_are_is_told() -> None:
    made, times = clocked(add("r"), add("s"), add("t"))
    sends = made.empty("p", ["d"]).sends
    assert made.stuck("p") is None
    for (_, move), reason in zip(sends[:2], ("no room", "another model"), strict=True):
        times.append(times[-1] + 1)
        made.fail_move("p", MoveFailed(move.request_id, move.epoch, reason))
    assert made.stuck("p") == "2 of 3 could not move yet: another model"
    bring(made, "s@0", 6, end="stop")
    assert made.stuck("p") == "1 of 2 could not move yet: no room"


def test_each_move_is_counted_once_whoever_tells_of_it() -> None:
    made, _ = clocked(*(add(name) for name in "abcdefg"))
    moves = {name: made.move_away(name, "d").sends[0][1].epoch for name in "abcdefg"}
    made.complete(Complete("a", moves["a"], (1,), (False,)))
    for worker in ("d", "p"):  # both sides say so
        made.fail_move(worker, MoveFailed("b", moves["b"], "no room"))
    # The request has ended; who hears of it first does not matter.
    made.fail_move("d", MoveFailed("c", moves["c"], "the request has ended"))
    bring(made, "c@0", 6, end="stop")
    bring(made, "d@0", 6, end="stop")
    made.fail_move("p", MoveFailed("d", moves["d"], "request 'd' is not at worker 'p'", True))
    made.fail_move("p", MoveFailed("e", moves["e"], "the request has ended", True))
    bring(made, "e@0", end="abort")
    made.complete(Complete("f", moves["f"], (1,), (False,)))
    made.fail_move("p", MoveFailed("f", moves["f"], "it took too long"))  # that was too late
    counts = made.tally
    assert (counts.moves_done, counts.moves_failed, counts.moves_ended, counts.resumed) == (
        2,
        1,
        3,
        0,
    )
    assert made.settled("p") == ["b"]  # the last one is under way
    made.lose("d", "killed")
    made.fail_move("p", MoveFailed("g", moves["g"], "worker 'd' is gone"))
    made.lose("p", "killed")
    for request in made.unplaced:
        made.place(request, "q")
    assert (counts.moves_done, counts.moves_failed, counts.moves_ended, counts.resumed) == (
        2,
        2,
        3,
        4,
    )


def test_a_receiver_that_gives_up_leaves_its_move_to_the_owner() -> None:
    """Who is told last that a move is off has the request: no other move begins before."""
    made, _ = clocked(add())
    [(_, move)] = made.empty("p", ["d"]).sends
    assert made.fail_move("d", MoveFailed("r", move.epoch, "no room to grow")).sends == [
        ("d", Disown("r", move.epoch))
    ]
    assert made.settled("p") == [] and made.move_away("r", "e").sends == []
    made.fail_move("p", MoveFailed("r", move.epoch, "no room to grow"))
    assert made.settled("p") == ["r"]
