"""The decision log."""

from __future__ import annotations

import json

import numpy as np
import pytest
from harness import VOCAB, Run

from pagedkv.cache import BlockManager
from pagedkv.engine.core import EngineCore
from pagedkv.engine.toy import ToyExecutor
from pagedkv.errors import ConfigError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.decisions import Decision, DecisionLog
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.scheduler import Scheduler


def entries(run: Run, request: str) -> list[Decision]:
    return [entry for entry in run.scheduler.log.decisions if entry.request == request]


def kinds(run: Run, request: str) -> list[str]:
    return [entry.kind for entry in entries(run, request)]


def test_the_life_of_a_request_is_written_down():
    run = Run()
    run.add("a", range(20), max_tokens=3)
    run.finish()
    found = entries(run, "a")
    assert [e.kind for e in found] == ["arrive", "admit", "chunk", "chunk", "chunk", "end"]
    assert [e.numbers["tokens"] for e in found[2:5]] == [8, 8, 4]
    assert [e.numbers["pending"] for e in found[2:5]] == [20, 12, 4]
    assert [e.numbers["limit"] for e in found[2:5]] == ["budget", "budget", ""]
    assert [e.step for e in found] == [0, 0, 0, 1, 2, 4]
    assert found[1].numbers["demand"] == 5 and found[1].numbers["cached_tokens"] == 0
    assert found[-1].numbers == {"reasons": ["length"], "tokens": [3]}


def test_a_prefill_that_leaves_half_to_others_says_so():
    run = Run(budget=8)
    run.add("a", range(20), max_tokens=1)
    run.add("b", range(30, 40), max_tokens=1)
    run.step()
    assert [e.numbers["limit"] for e in entries(run, "a") if e.kind == "chunk"] == ["share"]
    run.finish()


def test_a_widened_prefill_is_not_limited():
    run = Run(budget=8, max_num_seqs=1)
    run.add("a", range(8), max_tokens=1)
    run.add("b", range(30, 40), max_tokens=1)
    run.step()
    [chunk] = [e for e in entries(run, "a") if e.kind == "chunk"]
    assert (chunk.numbers["tokens"], chunk.numbers["limit"]) == (8, "")
    run.finish()


def test_waiting_for_one_reason_is_one_entry():
    run = Run(max_num_seqs=1)
    run.add("a", range(4), max_tokens=6)
    run.add("b", range(10, 14), max_tokens=1)
    run.finish()
    waits = [e for e in entries(run, "b") if e.kind == "wait"]
    assert len(waits) == 1
    numbers = waits[0].numbers
    assert (numbers["reason"], numbers["count"]) == ("seats", 6)
    assert (waits[0].step, numbers["last_step"]) == (0, 5)
    assert kinds(run, "b") == ["arrive", "wait", "admit", "chunk", "end"]


def test_waiting_for_blocks_gives_the_numbers():
    run = Run(num_blocks=4, block_size=4, budget=16)
    run.add("a", range(12), max_tokens=3)
    run.add("b", range(20, 28), max_tokens=1)
    run.step()
    [wait] = [e for e in entries(run, "b") if e.kind == "wait"]
    assert wait.numbers["reason"] == "blocks"
    numbers = [wait.numbers[name] for name in ("demand", "blocks", "room", "free", "running")]
    assert numbers == [2, 5, 4, 4, 1]
    run.finish()


def test_waiting_for_a_sibling_gives_that_reason():
    run = Run(block_size=4, budget=8)
    run.add("a", range(16), max_tokens=1)
    run.add("b", range(16), max_tokens=1)
    run.finish()
    assert {e.numbers["reason"] for e in entries(run, "b") if e.kind == "wait"} == {"sibling"}


def test_a_running_prefill_that_gets_nothing_of_a_step_waits_for_the_budget():
    run = Run(budget=8, block_size=4)
    run.add("a", range(5), max_tokens=5, n=5, temperature=1.0)
    run.add("b", range(20, 32), max_tokens=1)
    run.add("c", range(30, 42), max_tokens=1)
    run.finish()
    waits = [e for e in entries(run, "c") if e.kind == "wait" and e.numbers["reason"] == "budget"]
    assert [e.numbers["pending"] for e in waits] == [9]


def test_a_preemption_gives_the_numbers():
    run = Run(num_blocks=6, block_size=4, budget=16)
    run.add("a", range(8), max_tokens=10)
    run.add("b", range(20, 28), max_tokens=10)
    run.finish()
    preempted = [e for e in entries(run, "b") if e.kind == "preempt"]
    assert preempted
    numbers = preempted[0].numbers
    assert numbers["how"] == "partial_drop" and numbers["demand"] > numbers["available"]
    assert (numbers["freed"], numbers["lost"], numbers["tokens"]) == (3, 2, 12)
    assert numbers["seconds"] == {}  # the toy takes no time
    admitted = [e.numbers["again"] for e in entries(run, "b") if e.kind == "admit"]
    assert admitted == [False] + [True] * (len(admitted) - 1) and len(admitted) > 1


def test_refusals_aborts_and_failures_are_written_down():
    run = Run(errors_ok=True)
    run.add("big", [1] * 300, max_tokens=1)
    run.add("a", range(8), max_tokens=50)
    run.step()
    run.abort("a")
    run.finish()
    [refused] = entries(run, "big")
    assert refused.kind == "refuse" and "max_model_len" in refused.numbers["message"]
    assert entries(run, "a")[-1].numbers["reasons"] == ["abort"]

    run.add("b", range(8), max_tokens=50)
    run.toy.submit = lambda step: 1 // 0
    run.step()
    fail = [e for e in run.scheduler.log.decisions if e.kind == "fail"]
    assert "ZeroDivisionError" in fail[0].numbers["message"]
    assert [e.kind for e in entries(run, "b")][-2:] == ["error", "end"]


def test_a_sample_that_outgrows_the_pool_is_cut_short():
    run = Run(num_blocks=3, block_size=4)
    run.add("a", range(8), max_tokens=10, n=2, temperature=1.0)
    run.finish()
    assert "cut_short" in kinds(run, "a")


def test_steps_hold_the_entries_of_the_tables_that_changed():
    run = Run(block_size=4, budget=16)
    run.add("a", range(10), max_tokens=8)
    run.add("b", range(10), max_tokens=8, n=2, temperature=1.0)
    run.finish()
    run.add("c", range(20, 22), max_tokens=1)  # the shorter table of a row that was another's
    run.finish()
    tables = np.zeros((run.manager.max_seqs, run.manager.max_blocks_per_seq), np.int32)
    steps = run.scheduler.log.steps
    assert len(steps) == len(run.steps)
    for entry, step in zip(steps, run.steps, strict=True):
        changed = entry.numbers["table"]
        tables[changed[:, 0], changed[:, 1]] = changed[:, 2]
        width = step.changed_tables.shape[1]
        assert (tables[step.changed_rows, :width] == step.changed_tables).all()
        assert not tables[step.changed_rows, width:].any()
        assert entry.numbers["seqs"] is step.seqs and entry.step == step.index
    copies = [e.numbers["copies"].tolist() for e in steps if "copies" in e.numbers]
    assert copies == [s.copies.tolist() for s in run.steps if len(s.copies)] != []
    # A step that changes no block is short.
    assert any(len(e.numbers["table"]) == 0 for e in steps)


def run_with(limit: int, sink=None) -> DecisionLog:
    manager = BlockManager(32, 4, max_seqs=8)
    scheduler = Scheduler(manager, SchedulerConfig(8, 8, 64, (), VOCAB, decision_log=limit))
    if sink is not None:
        scheduler.log.follow(sink)
    core = EngineCore(scheduler, ToyExecutor(32, 4, VOCAB))
    for i in range(9):
        params = SamplingParams(temperature=0.0, max_tokens=4)
        core.send(Add(f"r{i}", tuple(range(i, i + 10)), params, float(i), 0))
    now = 0.0
    while core.has_unfinished():
        core.step(now)
        now += 0.5
    return scheduler.log


def test_the_log_is_bounded_and_counts_what_it_dropped():
    whole, short, off = run_with(4096), run_with(7), run_with(0)
    assert whole.num_dropped == 0 and len(whole.decisions) > 30
    assert [e.line() for e in short.decisions] == [e.line() for e in whole.decisions[-7:]]
    assert [e.line() for e in short.steps] == [e.line() for e in whole.steps[-7:]]
    assert short.num_dropped == len(whole.decisions) - 7
    assert off.decisions == off.steps == []


def test_a_sink_sees_everything_in_order_even_when_nothing_is_kept():
    lines: list[str] = []
    log = run_with(0, lambda entry: lines.append(entry.line()))
    assert log.decisions == []
    whole = run_with(4096)
    steps = [e.line() for e in whole.steps]
    assert [line for line in lines if line in steps] == steps
    assert sorted(lines) == sorted(steps + [e.line() for e in whole.decisions])
    indices = [json.loads(line)["step"] for line in lines if '"step",' in line]
    assert indices == sorted(indices)


def test_waits_that_go_on_are_seen_and_can_be_finished():
    log, lines = DecisionLog(10), []
    log.follow(lambda entry: lines.append(entry.kind))
    log.at(3, 1.0)
    log.wait("a", "seats", taken=1)
    log.at(4, 2.0)
    log.wait("a", "seats", taken=2)
    assert [e.numbers for e in log.decisions] == [
        {"reason": "seats", "taken": 1, "count": 2, "last_step": 4, "last_now": 2.0}
    ]
    assert lines == []
    log.wait("a", "blocks")
    assert lines == ["wait"]
    log.finish()
    assert lines == ["wait", "wait"] and len(log.decisions) == 2


def test_lines_come_back_as_they_were():
    entry = Decision(3, 0.1, "step", "", {"seqs": np.array([1, 2]), "x": np.float32(0.1)})
    again = Decision.of(json.loads(entry.line()))
    assert again.line() == entry.line()
    assert (again.step, again.now, again.kind) == (3, 0.1, "step")


@pytest.mark.parametrize("missing", ["step", "now", "kind", "request"])
def test_lines_that_are_no_entry_are_refused(missing: str):
    values = json.loads(Decision(3, 0.1, "end", "a").line())
    with pytest.raises(ValueError, match=missing):
        Decision.of({key: value for key, value in values.items() if key != missing})


@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_a_limit_that_is_no_number_is_refused(value):
    with pytest.raises(ConfigError, match="decision_log"):
        SchedulerConfig(8, 8, 64, decision_log=value)
