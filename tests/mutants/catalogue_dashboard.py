"""Faults in the picture of the pool and in the figures of the dashboard."""

from __future__ import annotations

from kinds import Mutant

_PICTURE = "engine/test_picture.py::test_"
_HISTORY = "server/test_dashboard_history.py::test_"
_DATA = "server/test_dashboard_data.py::test_"
_PICTURES = "server/test_dashboard_pictures.py::test_"
_TOP = "cli/test_top.py::test_"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the last holder of a block is shown as the first",
        ("mirrors",),
        "cache/survey.py",
        "for i in range(len(rows) - 1, -1, -1):",
        "for i in range(len(rows)):",
        (_PICTURE + "every_step_of_a_run_with_groups_beams_and_preemptions",),
    ),
    Mutant(
        "a block that another holds whole is shown as full as the last one looked at",
        ("mirrors",),
        "cache/survey.py",
        "    alone = blocks[mentions[blocks] == counts[blocks]]\n",
        "    alone = blocks\n",
        (_PICTURE + "a_block_that_one_holds_in_part_and_another_whole_is_full",),
    ),
    Mutant(
        "reserved slots are shown as tokens",
        ("mirrors",),
        "cache/survey.py",
        "np.maximum(lengths[row] - place * size, 0)",
        "np.full(len(row), size)",
        (_PICTURE + "reserved_slots_hold_no_token_yet_and_leased_blocks_drain",),
    ),
    Mutant(
        "a picture has all ids of shared tables",
        ("bounded memory",),
        "engine/picture.py",
        '            "blocks": table[:most].astype("<i4").tobytes(),\n',
        '            "blocks": table.astype("<i4").tobytes(),\n',
        (_PICTURE + "a_picture_is_bounded",),
    ),
    Mutant(
        "figures keep requests that have ended",
        ("no leak",),
        "server/dashboard/history.py",
        "            del self._live[delta.request_id]\n",
        "            pass\n",
        (_HISTORY + "it_forgets",),
    ),
    Mutant(
        "the gauges stay at what the last step left",
        ("mirrors",),
        "server/dashboard/history.py",
        "        if batch.status is not None:\n",
        "        if batch.status is not None and batch.stats is not None:\n",
        (_HISTORY + "requests_that_are_aborted_when_no_step_follows_are_gone",),
    ),
    Mutant(
        "every viewer has the core take a picture",
        ("bounded memory",),
        "server/dashboard/pictures.py",
        "self._engine.clock() - newest.taken < FRESH",
        "self._engine.clock() - newest.taken < 0.0",
        (_PICTURES + "many_viewers_ask_the_core_as_often_as_one",),
    ),
    Mutant(
        "a tenant sees what others run and have cached",
        ("access",),
        "server/authentication.py",
        "    if tenant_of(request) != DEFAULT_TENANT:\n",
        "    if not tenant_of(request):\n",
        (_DATA + "it_shows_all_tenants_and_is_for_the_operator",),
    ),
    Mutant(
        "names steer the terminal",
        ("access",),
        "cli/top_frame.py",
        'sign if sign.isprintable() else "�"',
        "sign",
        (_TOP + "what_would_steer_the_terminal_is_not_printed",),
    ),
)
