"""Faults in deadlines: due times, chunks by slack, overload, expiry."""

from __future__ import annotations

from kinds import Mutant

_FIELDS = "scheduling/test_deadline_fields.py::test_"
_POLICY = "scheduling/test_deadline_policy.py::test_"
_FAIR = "scheduling/test_fair_deadline.py::test_"
_CHUNKS = "scheduling/test_chunking.py::test_"
_OVERLOAD = "scheduling/test_overload.py::test_"

MUTANTS = (
    Mutant(
        "an SLO of zero is accepted",
        ("refusal",),
        "scheduling/validate.py",
        "(_is_time(seconds) and seconds > 0)",
        "(_is_time(seconds) and seconds >= 0)",
        (_FIELDS + "an_slo_is_a_finite_number_above_zero",),
    ),
    Mutant(
        "a request ends at its deadline instead of after it",
        ("deadlines",),
        "scheduling/expiry.py",
        "self._heap[0][0] < now",
        "self._heap[0][0] <= now",
        (_FIELDS + "a_request_is_finished_at_its_deadline_and_ended_after_it",),
    ),
    Mutant(
        "expired requests that run go on",
        ("deadlines",),
        "scheduling/expiry.py",
        "            if roster.has(request):\n",
        "            if request.live and not request.branches:\n",
        (_FIELDS + "a_request_is_finished_at_its_deadline_and_ended_after_it",),
    ),
    Mutant(
        "deadlines of ended requests are kept for ever",
        ("bounded memory",),
        "scheduling/expiry.py",
        "if len(self._heap) > 2 * len(roster.requests) + 64:",
        "if False:",
        (_FIELDS + "deadlines_of_requests_that_have_ended_are_forgotten",),
    ),
    Mutant(
        "best effort is served last whatever its age",
        ("bounded waiting",),
        "scheduling/slack.py",
        "        return request.arrival + ageing\n",
        "        return due\n",
        (_POLICY + "best_effort_waits_for_its_age_and_no_longer",),
    ),
    Mutant(
        "who has the least slack yields",
        ("deadlines", "preemption"),
        "scheduling/policies/deadline.py",
        "return (due - now - self._cost.recompute_seconds(computed + left),)",
        "return (now - due,)",
        (_POLICY + "who_has_the_most_slack_yields",),
    ),
    Mutant(
        "a running prefill takes the step of one that is due earlier",
        ("bounded waiting", "deadlines"),
        "scheduling/planning.py",
        "        return max(1, total - len(first.prompt))\n",
        "        return total\n",
        (_POLICY + "a_prefill_makes_room_for_one_that_is_due_earlier",),
    ),
    Mutant(
        "a request waits for its sibling until it is late",
        ("deadlines",),
        "scheduling/siblings.py",
        "return request.num_passings < MAX_PASSINGS and spare > 0",
        "return request.num_passings < MAX_PASSINGS",
        (_POLICY + "a_request_does_not_wait_for_a_sibling_when_its_first_token_would_be_late",),
    ),
    Mutant(
        "a chunk takes no notice of slack",
        ("deadlines",),
        "scheduling/chunking.py",
        "    if math.isinf(target):\n",
        "    if True:\n",
        (_CHUNKS + "no_decode_is_late_for_the_sake_of_a_prefill",),
    ),
    Mutant(
        "a late decode stops all prefills",
        ("progress", "deadlines"),
        "scheduling/chunking.py",
        "in_time = [slack for slack in slacks if slack >= shortest]",
        "in_time = slacks",
        (_CHUNKS + "a_token_that_is_late_whatever_is_done_bounds_the_step_by_its_pace",),
    ),
    Mutant(
        "the late job is dropped instead of the longest",
        ("deadlines",),
        "scheduling/overload.py",
        "            dropped = heapq.heappushpop(longest, dropped)\n",
        "            pass\n",
        (_OVERLOAD + "as_many_jobs_are_in_time_as_any_choice_allows",),
    ),
    Mutant(
        "who was given up never comes back",
        ("deadlines",),
        "scheduling/overload.py",
        "                self._roster.demote(requests[i], False)\n",
        "                pass\n",
        (_OVERLOAD + "one_who_was_given_up_comes_back_when_there_is_room_to_spare",),
    ),
    Mutant(
        "nobody is rejected",
        ("deadlines",),
        "scheduling/overload.py",
        'if hopeless[i] and self._config.overload == "reject":',
        "if False:",
        (_OVERLOAD + "a_rejected_request_says_with_numbers_why",),
    ),
    Mutant(
        "an urgent request goes first whatever its tenant has been given",
        ("isolation", "deadlines"),
        "scheduling/policies/fair_deadline.py",
        "if self.counters[line.head.tenant] <= most and self._is_urgent(line.head, now)",
        "if self._is_urgent(line.head, now)",
        (
            _FAIR + "an_urgent_request_goes_first_if_its_tenant_has_little_more_than_the_least",
            _FAIR + "the_gap_between_tenants_is_bounded_and_v_is_what_urgency_costs",
        ),
    ),
)
