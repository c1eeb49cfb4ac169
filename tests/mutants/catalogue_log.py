"""Faults in the decision log, in recordings and in their replay."""

from __future__ import annotations

from kinds import Mutant

_LOG = "scheduling/test_decisions.py::test_"
_REPLAY = "simulation/test_replay_run.py::test_"
_RECORDING = "engine/test_recording.py::test_"

MUTANTS = (
    Mutant(
        "every plan in which a request waits has an entry",
        ("bounded memory", "mirrors"),
        "scheduling/decisions.py",
        'if wait is None or wait.numbers["reason"] != reason:',
        "if True:",
        (_LOG + "waiting_for_one_reason_is_one_entry",),
    ),
    Mutant(
        "entries that the tables have lost are not in the log",
        ("mirrors",),
        "scheduling/step.py",
        "np.nonzero(tables != self._rows[step.changed_rows])",
        "np.nonzero(tables > self._rows[step.changed_rows])",
        (_LOG + "steps_hold_the_entries_of_the_tables_that_changed",),
    ),
    Mutant(
        "what falls out of the log is not counted",
        ("mirrors",),
        "scheduling/decisions.py",
        "            self.num_dropped += 1\n",
        "            pass\n",
        (_LOG + "the_log_is_bounded_and_counts_what_it_dropped",),
    ),
    Mutant(
        "a replay compares no more entries than it has made",
        ("determinism",),
        "simulation/replay_run.py",
        "if recorded != replayed:",
        "if recorded != replayed and replayed is not None:",
        (_REPLAY + "decisions_more_or_fewer_than_recorded_are_a_difference",),
    ),
    Mutant(
        "what lower tiers have found is not recorded",
        ("determinism",),
        "scheduling/tiering.py",
        "            watcher(found)\n",
        "            watcher([])\n",
        (_REPLAY + "what_lower_tiers_have_is_part_of_a_recording",),
    ),
    Mutant(
        "a cache that is forgotten between steps is not recorded",
        ("determinism",),
        "engine/core.py",
        "            self._recorder.reset_cache()\n",
        "            pass\n",
        (_RECORDING + "inputs_and_decisions_are_written_in_order",),
    ),
)
