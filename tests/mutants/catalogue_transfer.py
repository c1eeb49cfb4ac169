"""Faults in the machines that move requests, and in the fence."""

from __future__ import annotations

from kinds import Mutant

_LINKS = "transfer/test_faulty_links.py::test_"
_MOVES = "transfer/test_moves.py::test_"
_FENCE = "transfer/test_fence.py::test_"
_FAULTS = "transfer/test_transfer_known_faults.py::test_"
_RECEIVER = "transfer/test_receiver.py::test_"
_PAYLOAD = "transfer/test_payload.py::test_"

MUTANTS = (
    Mutant(
        "what was not answered is not sent again",
        ("progress",),
        "transfer/sender.py",
        "elif it.waits and now >= it.retry_at:",
        "elif it.waits and now < it.retry_at - 1e9:",
        (_LINKS + "a_fault_at_any_message_changes_nothing[live-drop]",),
    ),
    Mutant(
        "payloads under way are freed when they are sent again",
        ("copy ordering",),
        "transfer/sender.py",
        "        it.flying.clear()  # not freed: they may arrive yet\n        return []\n",
        "        it.flying.clear()\n        return [Free(it.id, it.number)]\n",
        ("transfer/test_sender.py::test_failures_in_a_row_end_a_move",),
    ),
    Mutant(
        "a live move stops before its blocks have arrived",
        ("bounded waiting",),
        "transfer/sender.py",
        "if it.acked < it.goal or it.asked_to_park:",
        "if it.asked_to_park:",
        (_MOVES + "a_decoding_request_stands_still_for_its_last_block_only",),
    ),
    Mutant(
        "a silent receiver is waited for",
        ("progress",),
        "transfer/sender.py",
        "if now >= it.heard + limits.lease and it.lease is not None:",
        "if now >= it.heard + 1e9 and it.lease is not None:",
        ("transfer/test_sender.py::test_a_silent_receiver_is_given_up",),
    ),
    Mutant(
        "checksums are not compared",
        ("hit verification",),
        "transfer/payload.py",
        "if xxhash.xxh3_64_intdigest(block) != expected:",
        "if expected < 0:",
        (_PAYLOAD + "blocks_before_the_first_bad_one_are_kept",),
    ),
    Mutant(
        "bfloat16 rounds half up",
        ("isolation",),
        "transfer/payload.py",
        "(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16",
        "(bits + 0x8000) >> 16",
        (_PAYLOAD + "conversion_is_torchs_to_the_bit",),
    ),
    Mutant(
        "a failed move publishes what lies behind a gap",
        ("publish after compute",),
        "transfer/receiver.py",
        "        have = it.have\n",
        "        have = min(it.end, len(it.tokens))\n",
        (_FAULTS + "a_message_that_cannot_be_read_is_told_and_not_published",),
    ),
    Mutant(
        "a silent sender keeps its room",
        ("no leak",),
        "transfer/receiver.py",
        "elif it.state is not ReceiverState.COMPLETE and now >= it.heard + limits.lease:",
        "elif it.state is not ReceiverState.COMPLETE and now >= it.heard + 1e9:",
        (_FAULTS + "a_sender_that_never_reports_keeps_no_blocks",),
    ),
    Mutant(
        "a silent front end is waited for",
        ("no leak",),
        "transfer/receiver.py",
        "if it.state is ReceiverState.COMPLETE and now >= it.until:",
        "if it.state is ReceiverState.COMPLETE and now >= it.heard + limits.patience:",
        (_RECEIVER + "a_front_end_that_does_not_answer_is_not_waited_for_for_ever",),
    ),
    Mutant(
        "blocks of an owned request stay leased",
        ("no leak",),
        "transfer/receiver.py",
        "                it.hold.release()\n",
        "                pass\n",
        (_RECEIVER + "what_is_owned_stays_until_the_scheduler_has_it_but_not_for_ever",),
    ),
    Mutant(
        "the end of a move is forgotten at once",
        ("no leak",),
        "transfer/receiver.py",
        "        if move in self._ended:\n",
        "        if move in self._moves:\n",
        (_FAULTS + "a_move_that_was_never_granted_can_be_cancelled",),
    ),
    Mutant(
        "another worker may speak for a move",
        ("isolation",),
        "transfer/receiver.py",
        "        if it.worker != worker:\n",
        "        if not worker:\n",
        (_FAULTS + "a_name_that_is_used_twice_leaves_its_first_user_alone",),
    ),
    Mutant(
        "tokens of data are not compared",
        ("hit verification",),
        "transfer/receiver.py",
        "if not np.array_equal(known, tokens[: len(known)]):",
        "if len(known) > len(tokens):",
        (_RECEIVER + "data_of_other_tokens_ends_the_move",),
    ),
    Mutant(
        "a sender takes a complete copy back",
        ("terminal once",),
        "transfer/receiver.py",
        "decided_elsewhere = (ReceiverState.COMPLETE, ReceiverState.OWNED)",
        "decided_elsewhere = (ReceiverState.OWNED,)",
        (_RECEIVER + "a_complete_copy_is_the_front_ends_to_decide_on",),
    ),
    Mutant(
        "a receiver fills its whole pool with what comes",
        ("admission arithmetic",),
        "transfer/receiver.py",
        "if demand + spare > available:",
        "if demand > available:",
        (_RECEIVER + "a_receiver_keeps_room_for_what_it_runs",),
    ),
    Mutant(
        "another model's K/V is taken",
        ("refusal",),
        "transfer/handshake.py",
        "if theirs.model != ours.model:",
        "if len(theirs.model) < 1:",
        ("transfer/test_handshake.py::test_what_cannot_be_moved_is_refused_by_name",),
    ),
    Mutant(
        "tokens of an earlier owner are delivered",
        ("terminal once",),
        "transfer/fence.py",
        "if entry is None or entry.owner is None or entry.owner.epoch != move.epoch:",
        "if entry is None or entry.owner is None:",
        (_FENCE + "the_epoch_is_raised_once_and_then_only_the_new_owner_is_heard",),
    ),
    Mutant(
        "ownership does not wait for the old owner's last tokens",
        ("isolation",),
        "transfer/fence.py",
        "            if order < 0:\n                continue\n",
        "",
        (_FENCE + "ownership_waits_for_the_old_owners_last_tokens",),
    ),
    Mutant(
        "a copy that is behind gets the request",
        ("preemption",),
        "transfer/fence.py",
        "            if order > 0:\n",
        "            if order > 1:\n",
        (_FENCE + "a_copy_that_is_behind_what_was_delivered_is_disowned",),
    ),
    Mutant(
        "a late complaint of the old owner takes the request from the new one",
        ("terminal once",),
        "transfer/fence.py",
        "if entry.owner == Owner(worker, move.epoch):",
        "if entry.owner is not None and entry.owner.epoch == move.epoch:",
        (_FENCE + "a_failed_move_leaves_the_owner_and_a_failed_owner_leaves_an_orphan",),
    ),
    Mutant(
        "a token that was delivered is delivered again",
        ("preemption",),
        "transfer/fence.py",
        "        new = tokens[skip:]\n",
        "        new = tokens\n",
        (_FENCE + "only_the_next_token_is_delivered",),
    ),
)
