"""Roles change when one side starves for a time and the other has to spare; they do not swing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from pagedkv.errors import ConfigError
from pagedkv.transfer.roles import Roles
from pagedkv.transfer.router import Router
from pagedkv.transfer.routing import (
    Arrival,
    Decision,
    FlipConfig,
    RouterConfig,
    SetRole,
    Tick,
    WorkerReport,
)

FLIP = FlipConfig(patience_s=5.0, rest_s=60.0, queue_s=2.0, full_share=0.9, spare_load=0.6)


def report(name: str, role: Any, queue_s: float = 0.0, used: float = 0.0) -> WorkerReport:
    return WorkerReport(
        name,
        role,
        num_blocks=1000,
        free_blocks=round(1000 * (1 - used)),
        prefill_tokens_per_s=1000.0,
        queued_tokens=round(1000 * queue_s),
    )


def router(*reports: WorkerReport) -> Router:
    r = Router(RouterConfig(16, 1000, flip=FLIP))
    for each in reports:
        r.handle(each, 0.0)
    return r


def ticks(r: Router, start: int, end: int) -> list[tuple[int, Decision]]:
    return [(t, decision) for t in range(start, end) for decision in r.handle(Tick(), float(t))]


STARVING = (
    report("p", "prefill", queue_s=3.0),
    report("d1", "decode"),
    report("d2", "decode", used=0.1),
)


def test_prefill_starves_and_the_least_busy_decode_worker_turns() -> None:
    assert ticks(router(*STARVING), 0, 60) == [(5, SetRole("d1", "prefill"))]


def test_decode_starves_when_requests_wait_for_head_room() -> None:
    r = router(
        report("p1", "prefill", queue_s=0.1),
        report("p2", "prefill"),
        report("d", "decode", used=0.5),
    )
    assert r.handle(Arrival("r", 8000, 800), 0.0) == []
    assert ticks(r, 0, 60) == [(5, SetRole("p2", "decode"))]


def test_a_break_starts_the_patience_again() -> None:
    r = router(*STARVING)
    assert ticks(r, 0, 4) == []
    r.handle(report("p", "prefill", queue_s=1.9), 4.0)
    assert ticks(r, 4, 5) == []
    r.handle(report("p", "prefill", queue_s=2.1), 5.0)
    assert [t for t, _ in ticks(r, 5, 20)] == [10]


def test_nobody_gives_a_worker_that_it_needs() -> None:
    last = router(report("p", "prefill", queue_s=9.0), report("d", "decode"))
    assert ticks(last, 0, 30) == []
    # One decode worker would have 0.6 of the blocks in use, of 0.9: a load of 0.67.
    busy = router(
        report("p", "prefill", queue_s=9.0),
        report("d1", "decode", used=0.3),
        report("d2", "decode", used=0.3),
    )
    assert ticks(busy, 0, 30) == []


def test_both_sides_starve_and_nothing_is_changed() -> None:
    r = router(
        report("p1", "prefill", queue_s=9.0),
        report("p2", "prefill", queue_s=9.0),
        report("d1", "decode", used=0.95),
        report("d2", "decode", used=0.95),
    )
    assert ticks(r, 0, 60) == []


def test_a_worker_that_turns_gets_nothing_until_it_reports_its_new_role() -> None:
    r = router(*STARVING)
    ticks(r, 0, 6)
    (got,) = r.handle(Arrival("r", 16, 16), 6.0)
    assert (got.prefill, got.decode) == ("p", "d2")
    r.handle(report("d1", "decode"), 7.0)
    (got,) = r.handle(Arrival("s", 16, 16), 7.0)
    assert got.decode == "d2"
    r.handle(report("d1", "prefill"), 8.0)
    (got,) = r.handle(Arrival("t", 16, 16), 8.0)
    assert got.prefill == "d1"


def test_roles_rest_after_a_change_and_swing_at_most_once_a_rest() -> None:
    """A load that jumps to whichever side has fewer workers, every 6 seconds."""
    r = router(*(report(f"w{i}", "decode") for i in range(4)), report("p", "prefill", queue_s=9.0))
    roles = {"w0": "decode", "w1": "decode", "w2": "decode", "w3": "decode", "p": "prefill"}
    changes = []
    for t in range(600):
        prefill_is_short = t // 6 % 2 == 0
        for name, role in roles.items():
            short = prefill_is_short == (role == "prefill")
            r.handle(report(name, role, 9.0 if short else 0.0, 0.95 if short else 0.0), float(t))
        for decision in r.handle(Tick(), float(t)):
            assert isinstance(decision, SetRole)
            roles[decision.worker] = decision.role
            changes.append(t)
    assert 1 <= len(changes) <= 10
    assert all(b - a >= FLIP.rest_s for a, b in pairwise(changes))


def test_a_worker_that_never_turns_is_used_as_it_is_after_the_rest() -> None:
    r = router(*STARVING)
    ticks(r, 0, 6)
    r.handle(report("p", "prefill"), 6.0)
    ticks(r, 6, 66)
    r.handle(report("d2", "decode", used=0.99), 66.0)
    (got,) = r.handle(Arrival("r", 160, 160), 66.0)
    assert got.decode == "d1"


def test_bounds_that_let_roles_swing_are_refused() -> None:
    with pytest.raises(ConfigError, match="spare_load=1"):
        Roles(FlipConfig(spare_load=1.0))
    with pytest.raises(ConfigError, match="patience_s=0"):
        Roles(FlipConfig(patience_s=0.0))
