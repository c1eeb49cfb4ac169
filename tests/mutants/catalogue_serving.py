"""Faults in the scheduler, the beam search and the loop."""

from __future__ import annotations

from kinds import Mutant

_SCHEDULER = "scheduling/test_scheduler.py::test_"
_SCHEDULING = "scheduling/test_known_faults.py::test_"
_CORE = "engine/test_core_loop.py::test_"
_ADMISSION = "scheduling/test_admission.py::test_"
_BEAMS = "scheduling/test_beams.py::test_"
_SIBLINGS = "scheduling/test_siblings.py::test_"
_NAMESPACES = "scheduling/test_namespaces.py::test_"
_MACHINE = "engine/test_memory_machine.py::test_"

MUTANTS = (
    # ---- scheduler and loop
    Mutant(
        "all samples of a group draw with one seed",
        ("groups",),
        "scheduling/batch.py",
        "        request.seed + output.index,\n",
        "        request.seed,\n",
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
        "a sample that got several tokens is taken to lack one",
        ("isolation",),
        "scheduling/results.py",
        "            branch.decodes = False\n",
        "            pass\n",
        (_SCHEDULER + "several_tokens_of_a_decode_are_computed_next",),
    ),
    Mutant(
        "a long prompt takes the whole budget",
        ("bounded waiting",),
        "scheduling/turns.py",
        "others_wait = len(awaiting) > (request.order in awaiting)",
        "others_wait = False",
        (
            _SCHEDULER + "a_prefill_leaves_half_of_the_budget_while_another_request_waits_for_"
            "its_first_token",
        ),
    ),
    Mutant(
        "ended samples keep their sequences",
        ("no leak", "terminal once"),
        "scheduling/roster.py",
        "        self.close([branch for branch in request.branches if not branch.members])\n",
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
    # ---- siblings and namespaces
    Mutant(
        "a request waits without end for others",
        ("bounded waiting", "progress"),
        "scheduling/siblings.py",
        "return request.num_passings < MAX_PASSINGS",
        "return True",
        (_SIBLINGS + "nobody_is_passed_over_more_often_than_the_limit",),
    ),
    Mutant(
        "a request waits for another tenant's private tokens",
        ("isolation",),
        "scheduling/siblings.py",
        "if mine != theirs or request.namespace != leader.namespace:",
        "if mine != theirs:",
        (_NAMESPACES + "what_a_tenant_computes_does_not_depend_on_the_private_text_of_another",),
    ),
    Mutant(
        "a widened prefill outgrows the pool",
        ("admission arithmetic",),
        "scheduling/admission.py",
        "if counts != [row.count for row in rows] and manager.can_reserve(\n"
        "        [row.branch.seq for row in (*rows, *loads)], "
        "counts + [row.count for row in loads]\n"
        "    ):",
        "if True:",
        (_SCHEDULER + "a_prefill_is_not_widened_beyond_the_pool",),
    ),
    Mutant(
        "who waits loses its seat to strangers",
        ("bounded waiting",),
        "scheduling/planning.py",
        "if running.samples + seats + len(request.live) > self.config.seats:",
        "if running.samples + len(request.live) > self.config.seats:",
        (_SIBLINGS + "a_sibling_does_not_hold_up_strangers_and_keeps_its_place",),
    ),
    Mutant(
        "a request waits for blocks that will have no name",
        ("progress",),
        "scheduling/siblings.py",
        "if self._manager.publishes(row.branch.seq):",
        "if True:",
        (_SIBLINGS + "a_leader_whose_blocks_get_no_names_is_not_waited_for",),
    ),
    Mutant(
        "tenant and salt are not framed",
        ("isolation", "key completeness"),
        "scheduling/namespaces.py",
        'return b"\\1" + len(data).to_bytes(8) + data',
        "return data",
        (_NAMESPACES + "pairs_that_run_together_differ",),
    ),
    # ---- admission, victims, endings
    Mutant(
        "a resumed group is charged its prompt's tail twice",
        ("admission arithmetic", "groups"),
        "scheduling/request.py",
        "return own - (prompt % block_size > 0)",
        "return own",
        (_ADMISSION + "a_resumed_group_is_let_in_where_it_just_fits",),
    ),
    Mutant(
        "a resumed group is charged a block too few",
        ("admission arithmetic", "groups"),
        "scheduling/request.py",
        "return own - (prompt % block_size > 0)",
        "return own - 1 - (prompt % block_size > 0)",
        (_ADMISSION + "a_resumed_group_waits_for_its_last_block",),
    ),
    Mutant(
        "the oldest yields",
        ("progress", "preemption"),
        "scheduling/victims.py",
        "if not request.parked][1:]\n",
        "if not request.parked][:-1]\n",
        (_ADMISSION + "the_newest_yields_and_the_oldest_is_never_sent_back",),
    ),
    Mutant(
        "an ending token is forbidden once too often",
        ("boundaries",),
        "scheduling/batch.py",
        "if len(output.tokens) < params.min_tokens:",
        "if len(output.tokens) <= params.min_tokens:",
        (_ADMISSION + "the_first_token_that_may_end_a_sample_is_the_one_after_min_tokens",),
    ),
    Mutant(
        "requests that have left the queue are remembered",
        ("bounded memory",),
        "scheduling/line.py",
        "        if request in self:\n",
        "        if request in self._requests[:1]:\n",
        (_ADMISSION + "who_left_the_queue_is_forgotten_while_the_first_still_waits",),
    ),
    # ---- beams
    Mutant(
        "a token beyond the best width ends a hypothesis",
        ("beams",),
        "scheduling/beams.py",
        "zip(best[:width], ended, strict=False)",
        "zip(best, ended, strict=True)",
        (_BEAMS + "an_end_token_counts_only_among_the_best_beam_width",),
    ),
    Mutant(
        "the end token is not part of the length",
        ("beams", "boundaries"),
        "scheduling/beams.py",
        "count = len(beams[0][0]) + 1",
        "count = max(1, len(beams[0][0]))",
        (_BEAMS + "the_end_token_counts_for_the_length",),
    ),
    Mutant(
        "equal sums go to the lower token before the earlier beam",
        ("beams", "determinism"),
        "scheduling/beams.py",
        "(-child.logprob, child.parent, child.token)",
        "(-child.logprob, child.token, child.parent)",
        (_BEAMS + "equal_sums_go_to_the_earlier_beam_and_the_lower_token",),
    ),
    Mutant(
        "a search stops when its hypotheses are full",
        ("beams",),
        "scheduling/beams.py",
        "self.params.early_stopping or self.score(best, count) <= self.finished[-1].score",
        "True",
        (_BEAMS + "when_the_search_is_over",),
    ),
    Mutant(
        "pruned beams keep their blocks",
        ("beams", "no leak"),
        "scheduling/results.py",
        "    roster.close([branch for branch, _ in drawn if branch not in heirs])\n",
        "",
        (_BEAMS + "beams_share_what_they_have_in_common",),
    ),
    Mutant(
        "beams of one parent are counted as strangers",
        ("beams", "admission arithmetic"),
        "scheduling/beams.py",
        "total = -(forked % block_size > 0)",
        "total = 0",
        (_BEAMS + "fork_trees_are_counted_like_blocks_by_content",),
    ),
    Mutant(
        "resumed beams do not wait for each other",
        ("beams", "preemption"),
        "scheduling/request.py",
        "waits = len(self.members) == 1 and self.request.is_gathering",
        "waits = False",
        (_BEAMS + "a_preemption_at_any_step_changes_nothing",),
    ),
    # ---- tenants, reports, memory
    Mutant(
        "another tenant's prefix is taken over",
        ("isolation",),
        "scheduling/planning.py",
        "self.manager.open(tokens, request.namespace, request.public)",
        "self.manager.open(tokens, None, request.public)",
        (_SCHEDULING + "foreign_tenant_is_never_hit",),
    ),
    Mutant(
        "own tokens found after a preemption count as hits",
        ("mirrors", "preemption"),
        "scheduling/roster.py",
        "        if not request.admitted:\n",
        "        if True:\n",
        (_SCHEDULING + "resume_hits_do_not_count_as_cached_tokens",),
    ),
    Mutant(
        "blocks in common are no saving",
        ("mirrors",),
        "engine/core.py",
        "blocks_unshared += samples * -(-lengths[seq] // size)",
        "blocks_unshared += -(-lengths[seq] // size)",
        (_CORE + "stats_count_shared_slots_once",),
    ),
    Mutant(
        "only the outermost limit counts",
        ("bounded memory",),
        "engine/machine.py",
        "        limit = min(limit, group_limit)\n",
        "        limit = group_limit\n",
        (_MACHINE + "smallest_limit_of_nested_groups",),
    ),
    Mutant(
        "the null block is forgotten in the size of the pool",
        ("bounded memory",),
        "engine/memory.py",
        "num_blocks = limit // block_bytes - 1\n",
        "num_blocks = limit // block_bytes\n",
        ("engine/test_memory_pool.py::test_default_is_the_stated_share_less_the_null_block",),
    ),
)
