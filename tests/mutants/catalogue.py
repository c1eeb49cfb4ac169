"""Planted faults: slips that real cache managers have made, and the tests that must see each.

`kinds` are properties that the fault breaks; KINDS says what they are. Every one needs a fault.
"""

from __future__ import annotations

from typing import NamedTuple

KINDS = {
    "conservation": "each block is in exactly one of the four states",
    "reference exactness": "a count is the number of holders",
    "no leak": "nothing is held when nothing runs",
    "all or nothing": "a call that fails changes nothing",
    "admission arithmetic": "what is promised to fit fits, and the other way round",
    "terminal once": "every request ends exactly once, and is forgotten then",
    "write exclusivity": "a slot is written only where nobody else reads",
    "publish after compute": "a name is given when the content is there, not before",
    "key completeness": "equal names mean equal content",
    "hit verification": "content is compared, never guessed",
    "index consistency": "a name leads to its content; leaves are evicted first",
    "hits are protected": "a hit is held before anything is evicted",
    "at least one token": "every request computes a token",
    "boundaries": "lengths at and beside the edges of blocks",
    "inert garbage": "what is not a sequence's own is not read for it",
    "isolation": "a request's output is that of its solo run",
    "preemption": "a preempted request draws nothing twice",
    "groups": "samples of one request are independent and released each",
    "progress": "what was admitted can go on",
    "refusal": "what can never run is refused at once",
    "bounded waiting": "a long prompt does not hold up the first tokens of others",
    "copy ordering": "a block is not reused or overwritten while it is read elsewhere",
    "mirrors": "what is reported is the state",
    "streaming": "no character of a stop string is shown",
    "input totality": "bad input ends its own request",
    "idempotence": "ending a thing twice ends it once",
    "determinism": "the same calls give the same results",
}


class Mutant(NamedTuple):
    """`old`, which stands once in the file, becomes `new`; `tests` (under tests/) must fail."""

    name: str
    kinds: tuple[str, ...]
    file: str  # under the package
    old: str
    new: str
    tests: tuple[str, ...]


_FAULTS = "cache/test_cache_known_faults.py::test_"
_RULE = "cache/test_write_rule.py::test_"
_POOL = "cache/test_pool.py::test_"
_INDEX = "cache/test_index.py::test_"
_EXPORT = "cache/test_export.py::test_"
_SNAPSHOT = "cache/test_snapshot.py::test_"
_MISUSE = "cache/test_misuse.py::test_"
_STATES = "properties/test_exhaustive.py::test_every_state_of_two_sequences"
_SCHEDULER = "scheduling/test_scheduler.py::test_"
_SCHEDULING = "scheduling/test_known_faults.py::test_"
_CORE = "engine/test_core_loop.py::test_"

MUTANTS = (
    # ---- counts
    Mutant(
        "close releases nothing",
        ("reference exactness", "no leak"),
        "cache/manager.py",
        "self.pool.change(self.table.blocks[row, :count][::-1].copy(), -1)",
        "self.pool.change(self.table.blocks[row, :0], -1)",
        (_FAULTS + "negative_count_a_freed_block_can_be_had_again",),
    ),
    Mutant(
        "commit keeps the copy source",
        ("reference exactness", "no leak"),
        "cache/reserve.py",
        "        state.pool.change(sources, -1)\n",
        "",
        (_FAULTS + "destroyed_by_use_a_hit_on_a_cached_block_keeps_its_key",),
    ),
    Mutant(
        "cancel keeps the copies",
        ("reference exactness", "no leak"),
        "cache/reserve.py",
        "        state.pool.change(copies, -1)\n",
        "",
        (_RULE + "a_lease_on_the_tail_forces_a_copy",),
    ),
    Mutant(
        "commit keeps what it did not need",
        ("conservation", "no leak"),
        "cache/manager.py",
        "if np.count_nonzero(reserved > counts):",
        "if False:",
        (_RULE + "commit_of_fewer_gives_back_the_rest_and_cancel_all",),
    ),
    Mutant(
        "close frees the blocks of a sibling",
        ("reference exactness", "groups"),
        "cache/manager.py",
        "self.pool.change(np.tile(blocks, n), +1)",
        "self.pool.change(blocks, +1)",
        (_FAULTS + "group_blocks_shared_blocks_are_released_once_and_with_the_last_member",),
    ),
    Mutant(
        "a block named twice in one release is released once",
        ("reference exactness",),
        "cache/pool.py",
        "        else:\n            np.add.at(self.counts, blocks, delta)",
        "        else:\n            self.counts[blocks] += delta",
        (_POOL + "a_block_named_several_times_in_one_change_is_counted_as_often",),
    ),
    Mutant(
        "the block that a duplicate moves to is not held",
        ("reference exactness",),
        "cache/publish.py",
        "        state.pool.change(known_blocks, +1)\n",
        "",
        (_RULE + "equal_blocks_computed_twice_are_stored_once",),
    ),
    Mutant(
        "the null block is handed out",
        ("conservation",),
        "cache/pool.py",
        "np.arange(num_blocks, 0, -1, dtype=np.int32)",
        "np.arange(num_blocks - 1, -1, -1, dtype=np.int32)",
        (_POOL + "a_fresh_pool_hands_out_adjacent_blocks",),
    ),
    # ---- all or nothing, admission
    Mutant(
        "eviction before the refusal",
        ("all or nothing",),
        "cache/manager.py",
        "        need = plan.demand\n",
        "        need = plan.demand\n        evict(self._state, need - self.pool.num_free)\n",
        (_STATES + "[2-1-2]",),
    ),
    Mutant(
        "a row is taken before the rows are counted",
        ("all or nothing", "refusal"),
        "cache/lookup.py",
        "    table.need(1)\n",
        "",
        (_MISUSE + "opening_more_than_max_seqs_is_refused",),
    ),
    Mutant(
        "demand in whole blocks is rounded down",
        ("admission arithmetic", "boundaries"),
        "cache/lookup.py",
        "blocks = -(-len(query.tokens) // state.block_size)",
        "blocks = len(query.tokens) // state.block_size",
        ("cache/test_sequence_data.py::test_a_receiver_without_room_refuses_and_keeps_its_state",),
    ),
    Mutant(
        "hits are free even if nobody holds them",
        ("admission arithmetic",),
        "cache/lookup.py",
        "used = (pool.counts[hits.full] > 0) | (pool.leases[hits.full] > 0)",
        "used = pool.counts[hits.full] >= 0",
        (_FAULTS + "admission_counts_hits_that_leave_the_free_blocks",),
    ),
    Mutant(
        "a block too many at every edge",
        ("admission arithmetic", "boundaries"),
        "cache/writes.py",
        "fresh = -(-(starts + counts) // block_size) - owned",
        "fresh = (starts + counts) // block_size + 1 - owned",
        (_FAULTS + "migrated_exact_multiple_the_receiver_needs_one_block_more_for_the_next_token",),
    ),
    Mutant(
        "copies are not part of the demand",
        ("admission arithmetic",),
        "cache/writes.py",
        "    plan.demand += int(np.count_nonzero(copies))\n",
        "",
        (_RULE + "a_fork_that_does_not_write_forces_a_copy",),
    ),
    Mutant(
        "a request is admitted when its first block fits",
        ("admission arithmetic", "progress"),
        "scheduling/scheduler.py",
        "demand = manager.match(lookup, namespace=request.tenant).demand\n",
        "demand = min(1, manager.match(lookup, namespace=request.tenant).demand)\n",
        (_SCHEDULING + "livelock_admission_by_the_first_chunk_only",),
    ),
    # ---- the write rule
    Mutant(
        "a holder that does not write is overwritten",
        ("write exclusivity", "groups"),
        "cache/writes.py",
        "if pool.leases[block] or pool.counts[block] != len(places):",
        "if pool.leases[block]:",
        (
            _RULE + "a_fork_that_does_not_write_forces_a_copy",
            _RULE + "a_copy_source_of_another_reservation_is_not_overwritten",
        ),
    ),
    Mutant(
        "a leased block is overwritten",
        ("write exclusivity", "copy ordering"),
        "cache/writes.py",
        "if pool.leases[block] or pool.counts[block] != len(places):",
        "if pool.counts[block] != len(places):",
        (_RULE + "a_lease_on_the_tail_forces_a_copy",),
    ),
    Mutant(
        "a published block is written in place",
        ("write exclusivity",),
        "cache/writes.py",
        "        if extent:\n            plan.withdraw.append(block)\n",
        "",
        (
            _RULE
            + "a_published_tail_that_ends_at_the_writer_loses_its_name_and_is_written_in_place",
        ),
    ),
    Mutant(
        "a longer published tail is written over",
        ("write exclusivity",),
        "cache/writes.py",
        "if extent > fill[heir]:",
        "if extent > fill[heir] + block_size:",
        (_RULE + "a_published_tail_that_goes_on_is_copied",),
    ),
    Mutant(
        "the shortest of equal writers keeps the block",
        ("write exclusivity",),
        "cache/writes.py",
        "heir = max(places, key=lambda place: (fill[place], place))",
        "heir = min(places, key=lambda place: (fill[place], place))",
        (_RULE + "of_forks_that_all_write_the_longest_keeps_the_block_and_of_equals_the_last",),
    ),
    Mutant(
        "the last filled slot is not copied",
        ("boundaries", "copy ordering"),
        "cache/reserve.py",
        "copies[:, 2] = plan.starts[copying] % state.block_size",
        "copies[:, 2] = plan.starts[copying] % state.block_size - 1",
        (_RULE + "a_fork_that_does_not_write_forces_a_copy",),
    ),
    Mutant(
        "the copied tokens are forgotten",
        ("index consistency",),
        "cache/reserve.py",
        "        state.contents[copies[:, 1]] = state.contents[copies[:, 0]]\n",
        "",
        (_FAULTS + "stale_key_replaced_history_is_not_found_under_the_old_one",),
    ),
    # ---- names
    Mutant(
        "blocks are published at reserve",
        ("publish after compute",),
        "cache/manager.py",
        "        reservation = apply(self._state, plan, self.pool.allocate(need))\n",
        "        reservation = apply(self._state, plan, self.pool.allocate(need))\n"
        "        firsts, ends = plan.starts // self.block_size, plan.starts + plan.counts\n"
        "        publish_full(self._state, plan.rows, firsts, ends // self.block_size)\n",
        (_RULE + "commit_of_fewer_gives_back_the_rest_and_cancel_all",),
    ),
    Mutant(
        "a block that is not full is published as full",
        ("publish after compute", "boundaries"),
        "cache/manager.py",
        "starts // self.block_size, ends // self.block_size",
        "starts // self.block_size, -(-ends // self.block_size)",
        (_RULE + "a_lone_writer_writes_in_place",),
    ),
    Mutant(
        "a tail is published while somebody may append",
        ("publish after compute",),
        "cache/publish.py",
        "if pool.counts[block] > 1 or pool.extents[block]:",
        "if pool.extents[block]:",
        (_STATES + "[2-2-4]",),
    ),
    Mutant(
        "a block is published without its parent",
        ("publish after compute", "key completeness"),
        "cache/publish.py",
        "        if not follows:\n            continue\n",
        "",
        (_POOL + "stale_content_a_sequence_open_at_a_reset_publishes_nothing",),
    ),
    Mutant(
        "the namespace is not in the name",
        ("key completeness", "isolation"),
        "cache/index.py",
        'b"N" + _framed(name) + tail',
        'b"N" + tail',
        (_FAULTS + "missing_tenant_prompts_of_other_tenants_are_not_found",),
    ),
    Mutant(
        "the extra bytes are not in the name",
        ("key completeness",),
        "cache/index.py",
        'tail = b"\\0" if extra is None else b"x" + _framed(extra)',
        'tail = b"\\0"',
        (
            _FAULTS + "missing_adapter_the_same_prompt_under_another_adapter_is_another_name",
            _FAULTS + "missing_image_equal_placeholders_of_other_pictures_never_share",
        ),
    ),
    Mutant(
        "the parts of a name are not framed",
        ("key completeness",),
        "cache/index.py",
        "return len(value).to_bytes(4) + value",
        "return value",
        ("properties/test_framing.py::test_parts_of_a_name_do_not_run_together",),
    ),
    Mutant(
        "a block that is public in part is public",
        ("key completeness", "isolation"),
        "cache/publish.py",
        "public = at < table.public[rows] // state.block_size",
        "public = at <= table.public[rows] // state.block_size",
        (_INDEX + "the_public_part_is_shared_block_by_block",),
    ),
    Mutant(
        "truncate leaves the public part",
        ("key completeness", "isolation"),
        "cache/manager.py",
        "        self.table.public[row] = min(int(self.table.public[row]), n)\n",
        "",
        (_INDEX + "truncating_lowers_the_public_part",),
    ),
    Mutant(
        "the next block of a chain is a hit unseen",
        ("hit verification",),
        "cache/index.py",
        "n = len(path) if same.all() else int(same.argmin())",
        "n = len(path)",
        (_INDEX + "long_chains_are_followed_as_far_as_they_agree",),
    ),
    Mutant(
        "a recycled block is found under its old name",
        ("index consistency",),
        "cache/index.py",
        "        del self._nodes[key[7] % _SHARDS][key]\n",
        "",
        (_FAULTS + "stale_key_a_recycled_block_is_not_found_under_its_old_content",),
    ),
    Mutant(
        "the descendants of an evicted block keep their names",
        ("index consistency",),
        "cache/index.py",
        "                found += self.children(node)\n",
        "                pass\n",
        (_POOL + "reset_withdraws_held_names_too",),
    ),
    Mutant(
        "the head of a chain is evicted first",
        ("index consistency",),
        "cache/manager.py",
        "[::-1].copy(), -1)",
        ".copy(), -1)",
        (_FAULTS + "unreachable_tails_the_tail_of_the_oldest_chain_is_evicted_first",),
    ),
    Mutant(
        "the greatest of equal partial matches is taken",
        ("determinism",),
        "cache/index.py",
        "return self.node(min(key for key in near if key.startswith(start))), longest",
        "return self.node(max(key for key in near if key.startswith(start))), longest",
        (_INDEX + "partial_match_takes_the_longest_then_the_smallest",),
    ),
    # ---- hits, leases
    Mutant(
        "a hit can still be evicted",
        ("hits are protected",),
        "cache/pool.py",
        "            cached = idle[~leased & (self.extents[idle] > 0)]\n"
        "            self.eviction.discard(cached)\n",
        "            cached = idle[~leased & (self.extents[idle] > 0)]\n",
        (_STATES + "[2-1-2]",),
    ),
    Mutant(
        "a whole prompt can be a hit",
        ("at least one token", "boundaries"),
        "cache/lookup.py",
        "public_blocks = len(tokens) - 1, query.public // block_size",
        "public_blocks = len(tokens), query.public // block_size",
        (_FAULTS + "exact_multiple_a_full_hit_leaves_one_token_to_compute",),
    ),
    Mutant(
        "blocks that are being copied out are available",
        ("copy ordering", "admission arithmetic"),
        "cache/pool.py",
        "return self.num_free + self.num_cached\n",
        "return self.num_free + self.num_cached + self.num_draining\n",
        (_FAULTS + "counter_drift_the_states_of_the_blocks_always_add_up",),
    ),
    Mutant(
        "a lease is released twice",
        ("idempotence",),
        "cache/lease.py",
        "end, self._end = self._end, None",
        "end = self._end",
        (_POOL + "two_leases_of_a_block_both_have_to_end",),
    ),
    Mutant(
        "the end of a lease leaves the head to go first",
        ("index consistency",),
        "cache/lease.py",
        "    pool.refresh(state.index.lineage(ids[pool.is_cached(ids)].tolist()))\n",
        "",
        (_POOL + "released_leases_leave_leaves_first_whatever_their_order",),
    ),
    Mutant(
        "a closed id means whoever has its row now",
        ("idempotence",),
        "cache/table.py",
        "known = self.seqs[rows] == ids\n",
        "known = self.seqs[rows] > 0\n",
        (_MISUSE + "a_closed_sequence_is_a_key_error_even_when_its_row_is_used_again",),
    ),
    # ---- what others see
    Mutant(
        "the last page of a full row is empty",
        ("boundaries",),
        "cache/export.py",
        "last = (self.lengths - 1) % self._block_size + 1",
        "last = self.lengths % self._block_size",
        (_FAULTS + "negative_zero_the_last_page_of_an_exact_multiple_is_full",),
    ),
    Mutant(
        "tails of other rows are taken for a common prefix",
        ("inert garbage",),
        "cache/export.py",
        "full = self.lengths // self._block_size\n",
        "full = self._counts\n",
        (_EXPORT + "shared_tails_are_no_full_blocks",),
    ),
    Mutant(
        "a changed row is not reported",
        ("mirrors",),
        "cache/table.py",
        "        self.blocks[rows, at] = blocks\n        self.clock += 1\n"
        "        self.stamps[rows] = self.clock\n",
        "        self.blocks[rows, at] = blocks\n        self.clock += 1\n",
        (_EXPORT + "changed_rows_are_enough_to_keep_a_mirror",),
    ),
    Mutant(
        "a snapshot forgets pending copies",
        ("determinism",),
        "cache/snapshot.py",
        '    "copy_sources",\n',
        "",
        (_SNAPSHOT + "a_restored_manager_is_the_same_manager",),
    ),
    # ---- scheduler and loop
    Mutant(
        "all samples of a group draw with one seed",
        ("groups",),
        "scheduling/batch.py",
        "key=request.seed + output.index,",
        "key=request.seed,",
        ("scheduling/test_solo_equality.py::test_sample_i_of_seed_s_is_sample_0_of_seed_s_plus_i",),
    ),
    Mutant(
        "a resumed group draws its first tokens again",
        ("preemption",),
        "scheduling/request.py",
        "return len(self.members) == 1 or not self.request.started",
        "return True",
        (_SCHEDULING + "resume_group_is_preempted_and_resumed_as_one",),
    ),
    Mutant(
        "a long prompt takes the whole budget",
        ("bounded waiting",),
        "scheduling/batch.py",
        "return len(awaiting) > (request.order in awaiting)",
        "return False",
        (
            _SCHEDULER + "a_prefill_leaves_half_of_the_budget_while_another_request_waits_for_"
            "its_first_token",
        ),
    ),
    Mutant(
        "ended samples keep their sequences",
        ("no leak", "terminal once"),
        "scheduling/scheduler.py",
        "        self._close([branch for branch in request.branches if not branch.members])\n",
        "",
        (_SCHEDULING + "leak_a_request_that_ends_in_its_first_step_gives_its_seat_back",),
    ),
    Mutant(
        "the id of an ended request stays in use",
        ("terminal once",),
        "engine/core.py",
        "                    self._ids.discard(delta.request_id)\n",
        "                    pass\n",
        (_CORE + "an_id_in_use_is_refused_at_once_and_free_after_the_end",),
    ),
    Mutant(
        "a request that cannot be read ends the loop",
        ("input totality",),
        "engine/core.py",
        "except Exception as error:  # its own end, not the loop's",
        "except ZeroDivisionError as error:",
        (_SCHEDULER + "dead_engine_a_request_that_cannot_be_read_ends_alone",),
    ),
    Mutant(
        "the beginning of a stop string is shown",
        ("streaming",),
        "engine/stops.py",
        "border = len(whole) - open_",
        "border = len(whole)",
        ("engine/test_output_stops.py::test_stop_string_over_several_tokens",),
    ),
)
