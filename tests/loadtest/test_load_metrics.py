"""Figures of load tests, worked out by hand from scripted times."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pagedkv.loadtest import metrics
from pagedkv.loadtest.answer import Answer
from pagedkv.loadtest.datasets import Question
from pagedkv.loadtest.drive import Outcome
from pagedkv.loadtest.requests import Goals, LoadRequest, SloClass, Tenant
from pagedkv.loadtest.run import LoadRun

A, B = Tenant("a", "ka"), Tenant("b", "kb")
FAST, SLOW = SloClass("fast", Goals(0.2, 0.05)), SloClass("slow", Goals(5.0, 1.0))


def outcome(
    due: float,
    times: Sequence[float],
    tokens: int,
    *,
    late: float = 0.0,
    held: float = 0.0,
    tenant: Tenant | None = None,
    slo_class: SloClass | None = None,
    error: str | None = None,
) -> Outcome:
    """One that was sent when it was due, with 10 prompt tokens of which 4 were cached."""
    answer = Answer(list(times), 10, tokens, 4, "", error)
    request = LoadRequest(due, Question("p", tokens), tenant, slo_class)
    released = due + late
    ended = max([released, *times])
    return Outcome(request, due, released, released + held, ended, answer)


THREE = [
    outcome(0.0, [0.1, 0.2, 0.4], 4, tenant=A, slo_class=FAST),  # tpot 0.3 / 3
    outcome(1.0, [1.3, 1.5], 2, tenant=B, slo_class=SLOW),  # tpot 0.2
    outcome(1.5, [2.5], 1, tenant=A, slo_class=SLOW),  # no tpot
]
FAILED = outcome(2.0, [2.1], 1, tenant=B, slo_class=SLOW, error="HTTP 500: no")


def test_totals_and_rates() -> None:
    figures = metrics.figures([*THREE, FAILED], 2.0, None, [99])
    assert (figures["completed"], figures["failed"]) == (3, 1)
    assert figures["total_input_tokens"] == 30
    assert figures["total_cached_tokens"] == 12
    assert figures["total_output_tokens"] == 7
    assert figures["request_throughput"] == 1.5
    assert figures["output_throughput"] == 3.5
    assert figures["total_token_throughput"] == 18.5


def test_latencies_in_milliseconds() -> None:
    figures = metrics.figures(THREE, 2.0, None, [50, 99, 99.9])
    assert figures["mean_ttft_ms"] == pytest.approx((100 + 300 + 1000) / 3)
    assert figures["median_ttft_ms"] == figures["p50_ttft_ms"] == pytest.approx(300)
    assert figures["p99_ttft_ms"] == pytest.approx(300 + 0.98 * 700)
    assert figures["mean_tpot_ms"] == pytest.approx((100 + 200) / 2)
    assert figures["std_tpot_ms"] == pytest.approx(50)
    assert figures["mean_itl_ms"] == pytest.approx((100 + 200 + 200) / 3)
    assert figures["p50_e2el_ms"] == pytest.approx(500)
    assert "p99.9_itl_ms" in figures


def test_the_names_are_those_of_vllm() -> None:
    figures = metrics.figures(THREE, 2.0, Goals(ttft=1.0), [99])
    expected = {
        "completed",
        "failed",
        "total_input_tokens",
        "total_output_tokens",
        "request_throughput",
        "request_goodput",
        "output_throughput",
        "total_token_throughput",
    }
    expected |= {
        f"{statistic}_{metric}_ms"
        for statistic in ("mean", "median", "std", "p99")
        for metric in ("ttft", "tpot", "itl", "e2el")
    }
    assert set(figures) - expected == {"total_cached_tokens", "slo_attainment"}
    assert expected <= set(figures)


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        (Goals(ttft=0.3001), 2),
        (Goals(ttft=0.05), 0),
        (Goals(tpot=0.15), 2),  # one token has no time between tokens
        (Goals(e2el=0.45), 1),
        (Goals(1.1, 0.25, 1.1), 3),
    ],
)
def test_goodput_counts_who_reaches_all_goals(goals: Goals, good: int) -> None:
    without = [outcome(o.due, o.answer.times, o.answer.output_tokens) for o in THREE]
    figures = metrics.figures(without, 2.0, goals, [])
    assert figures["request_goodput"] == good / 2.0
    assert figures["slo_attainment"] == pytest.approx(good / 3)


def test_without_goals_there_is_no_goodput() -> None:
    assert metrics.figures([outcome(0, [1], 1)], 2.0, None, [])["request_goodput"] is None


def test_the_goals_of_a_class_go_before_the_others() -> None:
    figures = metrics.figures([*THREE, FAILED], 2.0, Goals(ttft=0.0), [])
    # The first misses its time between tokens, the fourth failed.
    assert figures["slo_attainment"] == 2 / 4


def test_groups_have_the_figures_of_their_own() -> None:
    tables = metrics.groups([*THREE, FAILED], 2.0, None, [99])
    assert list(tables["tenants"]) == ["a", "b"]
    assert tables["tenants"]["a"]["completed"] == 2
    assert tables["tenants"]["b"]["failed"] == 1
    assert tables["slo_classes"]["fast"]["slo_attainment"] == 0.0
    assert tables["slo_classes"]["slow"]["slo_attainment"] == pytest.approx(2 / 3)
    assert tables["slo_classes"]["slow"]["total_output_tokens"] == 3


def test_the_generator_and_the_limit_are_told_apart() -> None:
    facts = metrics.generator([outcome(0, [9], 1, late=0.5), outcome(1, [9], 1, held=2)], [0.25])
    assert facts["max_lateness_ms"] == 500
    assert facts["mean_held_back_ms"] == 1000
    assert facts["max_lag_ms"] == 250
    assert metrics.generator([], [])["p99_lag_ms"] == 0


def test_a_generator_that_is_late_says_that_it_did_not_keep_up() -> None:
    good = LoadRun([outcome(0, [1], 1, late=0.05)], [0.002]).result(None, [99])
    assert good["generator_kept_up"] is True
    late = LoadRun([outcome(0, [1], 1, late=0.2)], []).result(None, [99])
    assert late["generator_kept_up"] is False
    lagging = LoadRun([outcome(0, [1], 1)], [0.05]).result(None, [99])
    assert lagging["generator_kept_up"] is False


def test_most_at_once_counts_moments_and_not_touching_ends() -> None:
    assert metrics.most_at_once([outcome(0, [1], 1), outcome(1, [2], 1)]) == 1
    assert metrics.most_at_once([outcome(0, [1.1], 1), outcome(1, [2], 1)]) == 2
    assert metrics.most_at_once([]) == 0


def test_failures_are_counted_by_reason_and_nothing_is_divided_by_zero() -> None:
    failed = [outcome(0, [], 0, error=why) for why in ("x", "y", "x")]
    assert metrics.failures(failed) == {"x": 2, "y": 1}
    figures = metrics.figures(failed, 0.0, Goals(ttft=1.0), [99])
    assert (figures["completed"], figures["request_throughput"]) == (0, 0.0)
    assert figures["mean_ttft_ms"] is figures["p99_itl_ms"] is None
    assert figures["request_goodput"] == 0.0


def test_details_have_a_value_for_each_request() -> None:
    details = metrics.details([THREE[0], FAILED])
    assert details["input_lens"] == [10, 10]
    assert details["output_lens"] == [4, 1]
    assert details["ttfts"] == pytest.approx([0.1, 0.1])
    assert details["itls"][0] == pytest.approx([0.1, 0.2])
    assert details["errors"] == ["", "HTTP 500: no"]
