"""Faults in cache events, in the index over workers, and in the router."""

from __future__ import annotations

from kinds import Mutant

_LOG = "cache/test_events.py::test_"
_WIRE = "transfer/test_kv_events.py::test_"
_INDEX = "transfer/test_worker_prefixes.py::test_"
_WAITING = "transfer/test_waiting.py::test_"
_ROUTER = "transfer/test_router.py::test_"
_ROLES = "transfer/test_roles.py::test_"

MUTANTS = (
    Mutant(
        "tails are published without an event",
        ("mirrors",),
        "cache/publish.py",
        "            state.index.log.publish([block], fill)\n",
        "            pass\n",
        (_LOG + "mirror_whatever_happens_a_mirror_equals_the_index",),
    ),
    Mutant(
        "a reader that waited too long is not told",
        ("mirrors",),
        "cache/events.py",
        "        if seq < self._first:\n            raise EventGap(seq, self._first)\n",
        "",
        (_LOG + "gap_a_reader_that_waited_too_long_is_told_and_starts_again",),
    ),
    Mutant(
        "a chain goes on across another event",
        ("mirrors",),
        "transfer/events.py",
        "if gone or (chain and not _follows(event, chain[-1])):",
        "if gone:",
        (_WIRE + "tenant_salt_equal_prompts_of_two_tenants_have_different_hashes",),
    ),
    Mutant(
        "a tail is told as a full block",
        ("mirrors",),
        "transfer/events.py",
        "                    if len(event.tokens) < 4 * self._block_size:\n"
        "                        continue\n",
        "",
        (_WIRE + "tails_are_not_told",),
    ),
    Mutant(
        "names on the way to a worker leave the tenant out",
        ("key completeness",),
        "tiers/names.py",
        "            frame = public if i < public_blocks else private\n",
        "            frame = public\n",
        (_WIRE + "tenant_salt_equal_prompts_of_two_tenants_have_different_hashes",),
    ),
    Mutant(
        "a gap is passed over",
        ("mirrors",),
        "transfer/prefix_index.py",
        "if expected != seq and not picture:",
        "if expected is None and not picture:",
        (_INDEX + "gap_in_the_numbers_forgets_the_worker_until_its_next_picture",),
    ),
    Mutant(
        "a late batch is taken again",
        ("idempotence",),
        "transfer/prefix_index.py",
        "if expected is not None and seq < expected:",
        "if False:",
        (_INDEX + "late_and_repeated_batches_change_nothing",),
    ),
    Mutant(
        "the names of a worker are not bounded",
        ("bounded memory",),
        "transfer/prefix_index.py",
        "if len(own) >= self._limit and name not in own:",
        "if False:",
        (_INDEX + "bound_names_past_it_are_not_remembered_and_shorten_the_prefix",),
    ),
    Mutant(
        "what was sent to a worker since its report does not count",
        ("admission arithmetic",),
        "transfer/fleet.py",
        "                    queued += part.tokens\n",
        "",
        (_ROUTER + "what_was_sent_and_not_reported_yet_counts",),
    ),
    Mutant(
        "a decode worker grants room for the prompt alone",
        ("admission arithmetic",),
        "transfer/placement.py",
        "can_receive = can_decode & (room >= need_all)",
        "can_receive = can_decode & (room >= need)",
        (_ROUTER + "decode_workers_grant_only_with_head_room_for_prompt_and_output",),
    ),
    Mutant(
        "requests overtake those that wait",
        ("bounded waiting",),
        "transfer/router.py",
        "if isinstance(found, Pair) and waiting and waiting.first.priority <= arrival.priority:",
        "if False:",
        (_ROUTER + "those_who_wait_are_served_in_order_and_not_overtaken",),
    ),
    Mutant(
        "a tenant that floods the router gets all the room",
        ("fairness",),
        "transfer/waiting.py",
        "        self._served[arrival.tenant] += tokens / arrival.weight\n",
        "",
        (_WAITING + "tenants_get_room_in_turn_whoever_came_first",),
    ),
    Mutant(
        "a request waits beyond its deadline",
        ("deadlines",),
        "transfer/waiting.py",
        "        if now <= self._first_deadline:\n            return []\n",
        "        return []\n",
        (_ROUTER + "shed_when_the_deadline_passes_while_it_waits",),
    ),
    Mutant(
        "a dead worker's blocks are found",
        ("mirrors",),
        "transfer/router.py",
        "            self.prefixes.forget(place)\n",
        "",
        (_ROUTER + "dead_worker_nothing_of_it_is_left",),
    ),
    Mutant(
        "roles do not rest after a change",
        ("progress",),
        "transfer/roles.py",
        "                self._rests_until = now + self._config.rest_s\n",
        "",
        (_ROLES + "roles_rest_after_a_change_and_swing_at_most_once_a_rest",),
    ),
)
