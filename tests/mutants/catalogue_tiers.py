"""Faults in what goes below the device and comes back."""

from __future__ import annotations

from kinds import Mutant

_TIERING = "scheduling/test_tiering.py::test_"
_TIERS = "tiers/test_tiers.py::test_"

MUTANTS = (
    Mutant(
        "blocks below are found across tenants",
        ("isolation",),
        "scheduling/tiering.py",
        "frames = make_frames(request.namespace, None)",
        "frames = make_frames(None, None)",
        (_TIERING + "tenants_do_not_find_each_others_blocks_below",),
    ),
    Mutant(
        "a load that failed counts as done",
        ("hit verification",),
        "scheduling/tiering.py",
        "count = spans[blocks - 1][1] - row.start if blocks else 0",
        "count = spans[-1][1] - row.start",
        (_TIERING + "a_block_that_cannot_be_loaded_is_computed_and_not_tried_again",),
    ),
    Mutant(
        "a load that failed is tried again and again",
        ("progress",),
        "scheduling/tiering.py",
        "branch.below = branch.below[blocks:] if blocks == len(spans) else []",
        "branch.below = branch.below[blocks:]",
        (_TIERING + "a_block_that_cannot_be_loaded_is_computed_and_not_tried_again",),
    ),
    Mutant(
        "blocks that are stored stay leased",
        ("no leak",),
        "scheduling/tiering.py",
        "                self.stats.failed_stores += count - done.blocks\n"
        "                for lease in leases:\n",
        "                self.stats.failed_stores += count - done.blocks\n"
        "                for lease in leases[1:]:\n",
        (_TIERING + "full_blocks_are_stored_behind_and_loaded_when_the_device_has_lost_them",),
    ),
    Mutant(
        "the partial tail of a victim is forgotten",
        ("preemption",),
        "scheduling/tiering.py",
        "tail = request.swapped",
        "tail = 0",
        (_TIERING + "a_victim_comes_back_with_its_partial_tail",),
    ),
    Mutant(
        "hits behind a gap are left out",
        ("preemption",),
        "scheduling/tiering.py",
        "spans = [span for span, there in zip(spans, found, strict=True) if there]",
        "spans = spans[: [*found, False].index(False)]",
        (_TIERING + "hits_after_a_gap_are_used",),
    ),
    Mutant(
        "a failed step leaves its loads open",
        ("no leak",),
        "scheduling/tiering.py",
        "            self._end_load(self._loads.pop(load.id), 0)\n",
        "            self._loads.pop(load.id)\n",
        (_TIERING + "a_failed_step_ends_leases_and_reservations",),
    ),
    Mutant(
        "host memory does not compare tokens",
        ("hit verification",),
        "tiers/host.py",
        "if slot < 0 or stored != tokens:",
        "if slot < 0:",
        (_TIERS + "a_name_below_with_other_tokens_is_a_miss",),
    ),
    Mutant(
        "what host memory evicts is lost",
        ("hit verification",),
        "tiers/host.py",
        "            self._below.put(name, tokens, self._arena[slot])\n",
        "            pass\n",
        (_TIERS + "what_the_host_evicts_goes_below_and_comes_up_again",),
    ),
)
