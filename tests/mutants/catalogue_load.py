"""Faults in what a load test reports."""

from __future__ import annotations

from kinds import Mutant

_ANSWER, _DRIVE = "loadtest/test_answer.py::test_", "loadtest/test_drive.py::test_"
_METRICS = "loadtest/test_load_metrics.py::test_"

MUTANTS = (
    Mutant(
        "a stream that was cut counts as completed",
        ("mirrors",),
        "loadtest/answer.py",
        "if answer.error is None and not self._done:",
        "if answer.error is None and not self._done and not answer.text:",
        (_ANSWER + "what_counts_as_failed",),
    ),
    Mutant(
        "the role of a chat counts as its first token",
        ("mirrors",),
        "loadtest/answer.py",
        'if name != "role")',
        'if name != "index")',
        (_ANSWER + "the_role_of_a_chat_is_no_token",),
    ),
    Mutant(
        "latencies are those of failed requests, too",
        ("mirrors",),
        "loadtest/metrics.py",
        "    done = [outcome for outcome in outcomes if outcome.answer.error is None]\n",
        "    done = list(outcomes)\n",
        (
            _METRICS + "totals_and_rates",
            _METRICS + "the_goals_of_a_class_go_before_the_others",
            _METRICS + "groups_have_the_figures_of_their_own",
        ),
    ),
    Mutant(
        "the first token has a share in the time between tokens",
        ("mirrors",),
        "loadtest/metrics.py",
        "(e2el - ttft) / (tokens - 1)",
        "(e2el - ttft) / tokens",
        (_METRICS + "latencies_in_milliseconds",),
    ),
    Mutant(
        "what a limit of concurrency holds back counts as lateness of the generator",
        ("mirrors",),
        "loadtest/drive.py",
        "        released = clock.now()\n        async with gate:\n",
        "        async with gate:\n            released = clock.now()\n",
        (_DRIVE + "a_limit_of_concurrency_holds_back_and_says_so",),
    ),
)
