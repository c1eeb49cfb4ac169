"""Faults in the conduct of the server: what it lets in, and how long it waits."""

from __future__ import annotations

from kinds import Mutant

_DOOR = "server/test_door.py::test_"
_EXCHANGE = "server/test_exchange.py::test_"

MUTANTS = (
    Mutant(
        "requests that are being read take no room in the queue",
        ("refusal",),
        "server/door.py",
        "coming = [*self._reading, *self._sent.values()]",
        "coming = [*self._sent.values()]",
        (_DOOR + "what_is_being_read_takes_room_until_that_is_over",),
    ),
    Mutant(
        "what the core has taken is still on its way",
        ("progress",),
        "server/door.py",
        "takewhile(lambda it: self._sent[it].number <= applied, self._sent)",
        "takewhile(lambda it: self._sent[it].number < 0, self._sent)",
        (_DOOR + "what_the_core_has_taken_is_not_on_its_way_any_more",),
    ),
    Mutant(
        "a body is as long as it says",
        ("bounded memory",),
        "server/exchange.py",
        "if max(length, declared) <= self._max_body:",
        "if declared <= self._max_body:",
        (_EXCHANGE + "what_is_too_large_is_refused",),
    ),
    Mutant(
        "bodies that were answered are still there",
        ("bounded memory", "no leak"),
        "server/exchange.py",
        "self._kept -= len(body)  # handlers",
        "self._kept -= 0  # handlers",
        (_EXCHANGE + "all_bodies_together_have_a_bound",),
    ),
    Mutant(
        "who takes nothing is given more time",
        ("bounded memory",),
        "server/http_protocol.py",
        "if left < self._left:",
        "if left <= self._left:",
        ("server/test_http_protocol.py::test_who_takes_nothing_is_cut_off_and_who_is_slow_is_not",),
    ),
)
