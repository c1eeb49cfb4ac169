"""Faults in the order of eviction."""

from __future__ import annotations

from kinds import Mutant

_EVICT = "cache/test_evict.py::test_"
_SCAN = "cache/test_scan_resistance.py::test_"

MUTANTS = (
    # ---- the order of eviction
    Mutant(
        "nothing is protected",
        ("scan resistance",),
        "cache/evict.py",
        "hot: Mask = self.hot[blocks]",
        "hot: Mask = np.zeros(len(blocks), np.bool_)",
        (
            _SCAN + "a_prefix_used_by_every_tenth_request_survives_ten_pools_of_others",
            _EVICT + "the_protected_ring_is_a_quarter_and_gives_back_its_oldest",
        ),
    ),
    Mutant(
        "a hit is no second use",
        ("scan resistance",),
        "cache/lookup.py",
        "    state.pool.use_again(blocks)\n",
        "",
        (_SCAN + "a_protected_block_that_is_held_is_not_evicted",),
    ),
    Mutant(
        "what was evicted is forgotten at once",
        ("scan resistance",),
        "cache/evict.py",
        "        del self.ghosts[digest]\n        return True\n",
        "        return False\n",
        (_SCAN + "a_new_hot_prefix_hits_from_its_third_use",),
    ),
    Mutant(
        "the protected ring takes the whole pool",
        ("scan resistance",),
        "cache/evict.py",
        "surplus = len(self.protected) - self._limit",
        "surplus = 0",
        (_EVICT + "the_protected_ring_is_a_quarter_and_gives_back_its_oldest",),
    ),
    Mutant(
        "evicted names are remembered for ever",
        ("bounded memory",),
        "cache/evict.py",
        "while len(self.ghosts) > self._max_ghosts:",
        "while False:",
        (_EVICT + "evicted_names_are_remembered_for_a_while",),
    ),
    Mutant(
        "a protected block that is hit can still be evicted",
        ("hits are protected",),
        "cache/evict.py",
        "        if len(self.protected):\n            self.protected.discard(blocks)\n",
        "",
        (_SCAN + "a_protected_block_that_is_held_is_not_evicted",),
    ),
    Mutant(
        "a block is taken by its stale entry",
        ("index consistency",),
        "cache/evict.py",
        "live = np.flatnonzero(entries == self._stamp_of[blocks])[:k]",
        "live = np.flatnonzero(self._stamp_of[blocks] > 0)[:k]",
        (_EVICT + "compaction_keeps_the_order",),
    ),
)
