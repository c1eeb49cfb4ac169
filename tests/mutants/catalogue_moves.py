"""Faults in what an engine does for requests that move: resume, park, release, host."""

from __future__ import annotations

from kinds import Mutant

_RESUME = "scheduling/test_resume.py::test_"
_PARKING = "scheduling/test_parking.py::test_"
_MOVING = "engine/test_moving_requests.py::test_"
_GROUPS = "engine/test_moving_groups.py::test_"

MUTANTS = (
    Mutant(
        "the deadline of a request that has gone elsewhere ends another of its name",
        ("terminal once",),
        "scheduling/roster.py",
        "return self.requests.get(request.id) is request",
        "return bool(request.live)",
        (_RESUME + "the_deadline_of_one_that_has_left_is_nobodys",),
    ),
    Mutant(
        "times of another clock are taken as they are",
        ("deadlines",),
        "scheduling/resume.py",
        "if resume.sent_at is None:",
        "if resume.sent_at is not None:",
        (_RESUME + "its_times_are_moved_to_the_clock_of_the_receiver",),
    ),
    Mutant(
        "a resumed request has not started",
        ("isolation",),
        "scheduling/resume.py",
        "request.started = any(output.tokens for output in request.live)",
        "request.started = False",
        (_RESUME + "cut_at_any_token",),
    ),
    Mutant(
        "parked requests are in the steps",
        ("preemption",),
        "scheduling/request.py",
        "if self.loading or self.request.parked:",
        "if self.loading:",
        (_PARKING + "it_draws_nothing_and_goes_on_with_the_same_tokens",),
    ),
    Mutant(
        "who waits for blocks that are moved away is cut short",
        ("progress",),
        "scheduling/planning.py",
        "elif self._stores or roster.held_elsewhere:",
        "elif self._stores:",
        (_PARKING + "its_blocks_are_nobodys_and_whoever_is_left_waits_for_them",),
    ),
    Mutant(
        "a parked request is a victim",
        ("preemption",),
        "scheduling/victims.py",
        "others = [request for request in roster.running if not request.parked][1:]",
        "others = roster.running[1:]",
        (_PARKING + "others_are_preempted_and_not_the_parked",),
    ),
    Mutant(
        "a request whose move has failed stands still for ever",
        ("progress",),
        "engine/moves.py",
        "self._scheduler.unpark(leaving.request_id, now)",
        "pass",
        (_MOVING + "a_request_goes_on_where_it_is_when_nobody_takes_it",),
    ),
    Mutant(
        "beams that still change places are sent",
        ("isolation",),
        "engine/leaving.py",
        "fixed = request.search is None or self.parked",
        "fixed = True",
        (_GROUPS + "beams_go_with_their_tree",),
    ),
    Mutant(
        "a group that was moved computes its samples' own tokens again",
        ("preemption",),
        "scheduling/reopening.py",
        "    if alone >= tree:\n",
        "    if alone >= 0:\n",
        (_GROUPS + "samples_that_have_parted_are_not_computed_again",),
    ),
)
