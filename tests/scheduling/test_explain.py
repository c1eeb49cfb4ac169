"""Decisions in words."""

from __future__ import annotations

import json

import pytest
from harness import Run

from pagedkv.engine.toy import payload_bytes
from pagedkv.errors import RequestError
from pagedkv.scheduling.decisions import Decision
from pagedkv.scheduling.explain import describe, explain
from pagedkv.scheduling.tenants import Tenant
from pagedkv.tiers.host import HostTier


def timed(run: Run, seconds: float = 0.5) -> Run:
    """Runs to the end, a step every half second."""
    now = 0.0
    while run.core.has_unfinished():
        run.record(run.core.step(now)[0])
        now += seconds
    return run


def tell(run: Run, name: str) -> str:
    return explain(run.scheduler.log.decisions, name)


def test_why_a_request_waited_for_a_seat() -> None:
    run = Run(max_num_seqs=1)
    run.add("a", range(4), max_tokens=6)
    run.add("b", range(10, 14), max_tokens=1, tenant="blue")
    text = tell(timed(run), "b")
    assert "arrived (tenant blue): 4 prompt tokens, 1 sample; 1 waiting, 0 running" in text
    assert (
        "0.000 s  waited for a seat in 6 plans (steps 0 to 5, 2.500 s): it needs 1, and 1 of 1 "
        "were taken" in text
    )
    assert "3.000 s  admitted in step 6: 0 of 4 tokens found in the cache" in text
    assert "3.000 s from its arrival until it ran; first in line: 3.000 s for a seat" in text
    assert "ended: length after 1 token" in text


def test_why_a_request_waited_for_blocks_and_behind_whom() -> None:
    run = Run(num_blocks=4, block_size=4, budget=16)
    run.add("a", range(12), max_tokens=3)
    run.add("b", range(20, 28), max_tokens=3)
    run.add("c", range(30, 34), max_tokens=1)
    timed(run)
    assert (
        "its known tokens, beside what the running requests still need, take 5 blocks (its own 2), "
        "and there was room for 4 (4 free, 0 cached)" in tell(run, "b")
    )
    assert "behind others" in tell(run, "c")


def test_why_a_request_was_preempted_and_who_waited_meanwhile() -> None:
    run = Run(num_blocks=6, block_size=4, budget=16)
    run.add("a", range(8), max_tokens=10)
    run.add("b", range(20, 28), max_tokens=10)
    run.add("c", range(40, 48), max_tokens=2)
    timed(run)
    text = tell(run, "b")
    assert "preempted in step 5 (partial drop): 2 rows needed 2 blocks, and 0 were free" in text
    assert "its 12 tokens gave 3 blocks back" in text
    assert "resumed in step" in text and "from its preemption until it ran" in text
    assert "nobody is let in while blocks run short, as in 1 step of these" in tell(run, "c")


def test_chunks_with_one_reason_are_one_line() -> None:
    run = Run(budget=8)
    run.add("a", range(40), max_tokens=1)
    text = tell(timed(run), "a")
    assert "4 chunks of 32 tokens together in steps 0 to 3: that was what the step's" in text
    assert "8 of 8 pending tokens in step 4" in text and text.count("pending") == 1


def test_predicted_seconds_of_the_ways_back_are_told() -> None:
    numbers = {"how": "swap", "rows": 1, "demand": 2, "available": 0, "tokens": 9, "freed": 3}
    numbers["seconds"] = {"recompute": 0.5, "swap": 0.25}
    text = describe(Decision(1, 0.0, "preempt", "a", numbers))
    assert text.endswith("predicted: recompute 0.5000 s, swap 0.2500 s")


def test_other_ends_are_told() -> None:
    run = Run(num_blocks=3, block_size=4, errors_ok=True)
    run.add("big", [1] * 300, max_tokens=1)
    run.add("grown", range(8), max_tokens=10)
    timed(run)
    assert "refuse: " in tell(run, "big") and "max_model_len" in tell(run, "big")
    run.toy.submit = lambda step: 1 // 0
    run.add("failed", range(8), max_tokens=10)
    timed(run)
    assert "error: step" in tell(run, "failed") and "ended: error" in tell(run, "failed")


def test_every_request_of_a_name_is_told_of() -> None:
    log = [Decision(0, float(i), "fail", f"a#{i}", {"message": f"no {i}"}) for i in (0, 1)]
    assert explain(log, "a").count("request a#") == 2
    assert explain(log, "a#1").count("request a#") == 1
    again = [Decision(i, 0.0, "refuse", "a", {"message": "no"}) for i in (0, 1)]
    assert explain(again, "a").count("request a") == 2


def test_unknown_and_forgotten_requests_are_told_apart() -> None:
    run = Run(max_num_seqs=1)
    run.add("a", range(4), max_tokens=1)
    timed(run)
    with pytest.raises(RequestError, match="'b' is not in the decision log: no request had this"):
        tell(run, "b")
    with pytest.raises(RequestError, match="among the 12 that have fallen out of the log"):
        explain(run.scheduler.log.decisions, "b", num_dropped=12)
    part = [entry for entry in run.scheduler.log.decisions if entry.kind != "arrive"]
    assert "what was before this has fallen out of the log" in explain(part, "a")


def test_a_request_that_waits_now_is_told_of() -> None:
    run = Run(max_num_seqs=1)
    run.add("a", range(4), max_tokens=9)
    run.add("b", range(4), max_tokens=9)
    run.step()
    run.step()
    text = tell(run, "b")
    assert "waited for a seat in 2 plans" in text and "it has not been admitted since" in text
    run.finish()


def test_why_a_request_waited_for_its_tenants_others() -> None:
    run = Run(tenants=(("blue", Tenant(max_running=1)),))
    run.add("a", range(4), max_tokens=4, tenant="blue")
    run.add("b", range(8), max_tokens=1, tenant="blue")
    run.add("c", range(8), max_tokens=1, tenant="red")
    timed(run)
    assert "its tenant runs 1, as many as it may (max_running)" in tell(run, "b")
    assert "max_running" not in tell(run, "c")


@pytest.mark.parametrize("rule", ["first_chunk", "max_tokens", "expected_peak"])
def test_every_rule_of_admission_has_words(rule: str) -> None:
    run = Run(num_blocks=5, block_size=4, budget=16, admission=rule)
    run.add("a", range(12), max_tokens=6)
    run.add("b", range(20, 34), max_tokens=1)
    text = tell(timed(run), "b")
    assert "waited for blocks" in text and rule not in text


def test_what_a_lower_tier_has_is_told() -> None:
    run = Run(num_blocks=8, tier=HostTier(99 * payload_bytes(4), payload_bytes(4)))
    for name in "ab":
        run.add(name, range(1, 18), max_tokens=1)
        timed(run)
        run.manager.reset_cache()
    assert "0 of 17 tokens found in the cache, 16 in a lower tier" in tell(run, "b")


def test_every_entry_has_words_also_from_a_file() -> None:
    run = Run(num_blocks=6, block_size=4, budget=16)
    for i in range(6):
        run.add(f"r{i}", range(8 + i), max_tokens=10, n=1 + i % 2, temperature=1.0)
    timed(run)
    for entry in run.scheduler.log.decisions:
        again = Decision.of(json.loads(entry.line()))
        assert describe(again) == describe(entry) != ""
    assert describe(Decision(3, 0.0, "invented", "a", {"x": 1})) == "invented in step 3: x 1"


@pytest.mark.parametrize("kind", ["arrive", "wait", "admit", "chunk", "preempt", "end"])
def test_numbers_that_are_none_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=kind):
        describe(Decision(1, 0.0, kind, "a", {"tokens": "many", "reason": 7}))
