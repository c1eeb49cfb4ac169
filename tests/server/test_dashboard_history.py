"""The figures of the dashboard: by the second, for a while; nothing is kept of what has ended."""

from __future__ import annotations

from array import array

import pytest

from pagedkv.engine.facts import Facts
from pagedkv.engine.status import CoreStatus
from pagedkv.engine.wire import Batch
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.counters import EngineCounters, TenantCounters
from pagedkv.scheduling.messages import Abort, Add, Delta, StepStats
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.tenants import Tenant
from pagedkv.server.dashboard.history import KEPT, MOST_TIMES, History, quantiles

BLOCKS, SIZE = 100, 4


class Watched(History):
    """With a clock that the test sets."""

    def __init__(self, **settings) -> None:
        self.now = 1000.0
        config = SchedulerConfig(8, 16, 64, **settings)
        super().__init__(Facts(config, BLOCKS, SIZE, 16), lambda: self.now)

    def add(self, name: str, prompt: int = 10, tenant: str | None = None, n: int = 1) -> None:
        params = SamplingParams(n=n)
        self.sent(Add(name, tuple(range(prompt)), params, self.now, 0, tenant=tenant))

    def step(self, *deltas: Delta, **stats) -> None:
        self.take(Batch(deltas, of(StepStats, stats), 0, status(**stats) if stats else None))


def of(kind: type, given: dict):
    """Zero where nothing is given."""
    return kind(**{name: given.get(name, 0) for name in kind.__slots__})


def status(tenants=(), hits=(), **given) -> CoreStatus:
    counted = {"tenants": tenants, "prefix_cache_hits": hits, "prefix_cache_queries": 40}
    counters = of(EngineCounters, counted)
    return of(CoreStatus, {"block_size": SIZE, "num_blocks": BLOCKS, "counters": counters, **given})


def test_before_anything_has_happened_all_blocks_are_free() -> None:
    history = Watched()
    columns = history.columns(-1)["columns"]
    assert columns["free"] == [BLOCKS] and columns["filled"] == [0]
    assert history.recent()["ttft_p50"] is None
    assert history.hits() == {"queried": 0, "found": {}}


def test_times_to_tokens() -> None:
    history = Watched()
    history.add("a", n=2)
    history.now = 1000.5
    history.step(Delta("a", 0, (1,), num_cached_tokens=4), Delta("a", 1, (2,)))
    history.now = 1000.7
    history.step(Delta("a", 0, (3,)))
    history.now = 1000.9
    history.step(Delta("a", 0, (4, 5)), Delta("a", 1, (2,)))
    recent = history.recent()
    assert recent["ttft_p50"] == recent["ttft_p99"] == pytest.approx(0.5)
    # Sample 0: 0.2, and two tokens in 0.2; sample 1: 0.4.
    assert recent["itl_p50"] == pytest.approx(0.2)
    assert recent["itl_p99"] == pytest.approx(0.4)


def test_a_second_without_news_is_as_the_one_before() -> None:
    history = Watched()
    history.step(
        blocks_free=50, blocks_cached=20, blocks_held=25, blocks_draining=5, unfilled_slots=25,
        num_running=3, num_waiting=2, num_tokens=7, num_preempted=1,
    )  # fmt: skip
    history.now = 1003.2
    data = history.columns(-1)
    columns = data["columns"]
    assert columns["second"] == [0, 1, 2, 3] and data["last"] == 2
    assert columns["filled"] == [18.75] * 4 and columns["empty"] == [6.25] * 4
    assert columns["draining"] == [5] * 4
    assert columns["waiting"] == [2] * 4
    assert columns["tokens"] == [7, 0, 0, None]  # the last second goes on
    assert columns["preemptions"] == [1, 0, 0, None]
    assert history.recent()["tokens_per_second"] == pytest.approx(7 / 3)
    assert history.recent()["waste"] == pytest.approx(0.25)
    assert history.columns(1)["columns"]["second"] == [2, 3]


def test_a_sample_that_fails_is_not_the_end_of_the_others() -> None:
    history = Watched()
    history.add("a", n=2)
    history.step(Delta("a", 0, (1,)), Delta("a", 1, (1,)))
    history.now += 0.5
    history.step(Delta("a", 0, finish_reason="error"), Delta("a", 1, (2,)))
    assert history.recent()["itl_p50"] == 0.5


def test_it_forgets() -> None:
    history = Watched()
    history.now += 10 * KEPT
    assert len(history.columns(-1)["columns"]["second"]) == KEPT
    history.add("a", n=2)
    history.add("b")
    history.step(Delta("a", 0, (), finish_reason="abort"))
    assert len(history._live) == 2
    history.step(Delta("a", 1, (), finish_reason="stop"), Delta("b", 0, finish_reason="error"))
    assert not history._live
    history.sent(Abort("b"))
    history.add("c")
    for _ in range(MOST_TIMES + 10):
        history.step(Delta("c", 0, (1,)))
    assert len(history._seconds[-1].itl) == MOST_TIMES


def test_requests_that_are_aborted_when_no_step_follows_are_gone() -> None:
    history = Watched()
    history.step(blocks_held=40, blocks_cached=60, num_running=8, num_waiting=9)
    history.take(Batch((), None, 0, status(blocks_free=70, blocks_cached=30)))
    columns = history.columns(-1)["columns"]
    assert columns["running"] == columns["waiting"] == columns["filled"] == [0]
    assert columns["free"] == [70]


def test_service_of_tenants_and_hits_by_tier() -> None:
    history = Watched(tenants=(("big", Tenant(weight=4)),))
    one = TenantCounters("big", 1, 10, 1), TenantCounters(None, 1, 5, 2)
    history.take(Batch((), None, 0, status(one, (("device", 7), ("host", 3)))))
    two = TenantCounters("big", 1, 10, 2), TenantCounters(None, 1, 5, 2)
    history.take(Batch((), None, 0, status(two, (("device", 9), ("host", 3)))))
    running = [{"tenant": "new", "running": 1, "waiting": 2, "blocks": 3}]
    big, nobody, new = history.tenants(running)
    assert (big["tenant"], big["weight"], big["recent"]) == ("big", 4, 14)
    assert (nobody["tenant"], nobody["prompt_tokens"], nobody["output_tokens"]) == (None, 5, 2)
    assert nobody["recent"] == 9 and nobody["running"] == 0
    assert (new["running"], new["waiting"], new["blocks"], new["recent"]) == (1, 2, 3, 0)
    assert history.hits() == {"queried": 40, "found": {"device": 9, "host": 3}}
    history.now += 61
    assert {entry["recent"] for entry in history.tenants([])} == {0}
    assert {entry["prompt_tokens"] for entry in history.tenants([])} == {10, 5}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (None, None)),
        ([3.0], (3.0, 3.0)),
        ([4.0, 1.0, 3.0, 2.0], (2.0, 4.0)),
        ([float(i) for i in range(1, 201)], (100.0, 198.0)),
    ],
)
def test_quantiles(values: list[float], expected: tuple[float | None, float | None]) -> None:
    assert quantiles([array("d", values)]) == expected
    assert quantiles([array("d", values[:2]), array("d", values[2:])]) == expected
