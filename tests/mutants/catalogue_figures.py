"""Faults in what is counted and reported."""

from __future__ import annotations

from kinds import Mutant

_TALLY = "scheduling/test_tally.py::test_"
_METRICS = "server/test_metrics.py::test_"

MUTANTS = (
    Mutant(
        "a hit after a preemption counts like one of the first admission",
        ("mirrors",),
        "scheduling/tally.py",
        "        self._hits[again][DEVICE] += cached",
        "        self._hits[0][DEVICE] += cached",
        (_TALLY + "tokens_found_again_are_no_prefix_hit_and_not_computed_again",),
    ),
    Mutant(
        "blocks that samples share count for each",
        ("mirrors", "groups"),
        "scheduling/usage.py",
        "count = len(np.unique(np.concatenate(tables))) if tables else 0",
        "count = len(np.concatenate(tables)) if tables else 0",
        (_TALLY + "blocks_that_samples_share_count_once",),
    ),
    Mutant(
        "the blocks of equal samples are counted when they have merged",
        ("mirrors", "groups"),
        "scheduling/results.py",
        "    note_merging(roster.manager, [row for row in rows if not row.branch.decodes])\n",
        "",
        (_TALLY + "equal_samples_merge_their_blocks_and_the_peak_is_before",),
    ),
    Mutant(
        "usage comes with the end of each sample",
        ("terminal once",),
        "scheduling/roster.py",
        "if not deltas or request.live:",
        "if not deltas:",
        (_TALLY + "usage_comes_once_with_the_last_delta",),
    ),
    Mutant(
        "a request of several samples takes one place in the queue",
        ("refusal",),
        "scheduling/line.py",
        "        self.num_samples += len(request.outputs)",
        "        self.num_samples += 1",
        (_TALLY + "n_counts_n_in_a_full_queue",),
    ),
    Mutant(
        "a request that is aborted while it waits stays swapped out",
        ("mirrors", "terminal once"),
        "scheduling/roster.py",
        "        self.swapped_out.discard(request.order)\n        if request in",
        "        if request in",
        (_TALLY + "a_request_that_leaves_is_swapped_out_no_more",),
    ),
    Mutant(
        "slots are counted as waste for each sequence that ends in a block",
        ("mirrors",),
        "cache/manager.py",
        "return len(blocks) * size - int(filled.sum())",
        "return len(rows) * size - int(filled.sum())",
        (_TALLY + "a_tail_that_samples_share_is_waste_once",),
    ),
    Mutant(
        "an error of a watcher reaches the request",
        ("input totality",),
        "server/async_engine.py",
        "        except Exception:  # a figure must not cost anybody a request",
        "        except KeyError:",
        (_METRICS + "an_error_in_a_metric_reaches_no_request",),
    ),
    Mutant(
        "each tenant has series of its own",
        ("bounded memory",),
        "server/metrics/status.py",
        "status.counters.tenants[: self._max_tenants]",
        "status.counters.tenants",
        (_METRICS + "tenants_beyond_the_cap_share_series_that_never_fall",),
    ),
    Mutant(
        "a stop string ends the request before its usage is known",
        ("terminal once",),
        "engine/output.py",
        "return self.complete and (self.usage is not None or not self.stopped)",
        "return self.complete",
        (
            "engine/test_output_processor.py::"
            "test_stop_string_over_two_deltas_ends_the_sample_and_tells_the_loop",
        ),
    ),
)
