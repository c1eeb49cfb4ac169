"""Faults in admission, forecasts, the cost model and the choice of victims."""

from __future__ import annotations

from kinds import Mutant

_MODES = "scheduling/test_admission_modes.py::test_"
_VICTIMS = "scheduling/test_victims.py::test_"

MUTANTS = (
    Mutant(
        "only the end of the longest output is looked at",
        ("admission arithmetic",),
        "scheduling/peak.py",
        "(alike * grown).sum(axis=1)).max())",
        "(alike * grown).sum(axis=1))[0])",
        ("scheduling/test_peak.py::test_the_peak_is_that_of_a_simulation",),
    ),
    Mutant(
        "outputs that have ended already are among those to come",
        ("admission arithmetic",),
        "scheduling/lengths.py",
        "first = bisect_right(known, generated)",
        "first = 0",
        ("scheduling/test_lengths.py::test_as_by_counting",),
    ),
    Mutant(
        "a common prefix goes with the first of its holders",
        ("admission arithmetic",),
        "scheduling/forecast.py",
        "ranked.sort(key=lambda entry: entry[0][0][0])",
        "ranked.sort(key=lambda entry: -entry[0][0][0])",
        (_MODES + "blocks_that_several_hold_are_counted_with_the_last_to_end",),
    ),
    Mutant(
        "who may outgrow the pool never starts",
        ("progress",),
        "scheduling/admission.py",
        'mode == "prompt" or not running:',
        'mode == "prompt":',
        (_MODES + "a_request_that_may_outgrow_the_pool_runs_alone",),
    ),
    Mutant(
        "the watermark stays free when nothing runs",
        ("progress",),
        "scheduling/admission.py",
        "watermark = self._watermark if running else 0",
        "watermark = self._watermark",
        (_MODES + "the_watermark_stays_free_beside_those_who_run",),
    ),
    Mutant(
        "the queue counts those who have left",
        ("mirrors", "refusal"),
        "scheduling/line.py",
        "            self.num_tokens -= len(request.prompt)\n",
        "",
        (_MODES + "a_queue_of_too_many_tokens_refuses_and_says_how_many",),
    ),
    Mutant(
        "durations that cannot be are believed",
        ("input totality",),
        "scheduling/cost.py",
        "return isinstance(seconds, (int, float)) and MIN_SECONDS <= seconds <= MAX_SECONDS",
        "return isinstance(seconds, (int, float))",
        ("scheduling/test_cost.py::test_durations_that_cannot_be_are_ignored_and_counted",),
    ),
    Mutant(
        "victims yield by their loss, whatever it releases",
        ("preemption",),
        "scheduling/victims.py",
        "victim.recovery.loss_per_block *",
        "victim.recovery.loss *",
        (_VICTIMS + "who_loses_least_for_a_block_yields",),
    ),
    Mutant(
        "the cheapest is sent back again and again",
        ("preemption", "progress"),
        "scheduling/victims.py",
        " * (1 + victim.request.num_preemptions)",
        "",
        (_VICTIMS + "who_has_yielded_before_weighs_more",),
    ),
)
