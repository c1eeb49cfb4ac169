"""Lower numbers first, and nobody waits for ever."""

from __future__ import annotations

from dataclasses import replace

from harness import Run

from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import SamplingParams


def add(run: Run, name: str, priority: int, arrival: float = 0.0) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3)
    prompt = (len(run.scheduler) + 1, 2, 3)
    run.core.send(Add(name, prompt, params, arrival, 0, priority=priority))


def order(run: Run) -> list[str]:
    run.finish()
    ends = [d.request_id for d in run.deltas if d.finish_reason is not None]
    assert len(ends) == len(set(ends))
    return ends


def test_lower_numbers_are_served_first_and_equal_ones_by_arrival() -> None:
    run = Run(max_num_seqs=1, policy="priority")
    for name, priority in (("c", 1), ("a", -3), ("d", 1), ("b", 0)):
        add(run, name, priority)
    assert order(run) == ["a", "b", "c", "d"]


def test_waiting_outweighs_priority() -> None:
    """What arrives 10 s after a number that is 1 higher comes behind it, 9 s after before it."""
    run = Run(max_num_seqs=1, policy="priority", ageing=10)
    add(run, "waits", 1, arrival=0.0)
    add(run, "late", 0, arrival=10.5)
    add(run, "early", 0, arrival=9.5)
    assert order(run) == ["early", "waits", "late"]


def test_the_highest_number_yields_first_whoever_came_first() -> None:
    run = Run(num_blocks=8, block_size=4, policy="priority", prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    base = Add("first", (1,) * 4, params, 0.0, 0)
    for name, priority in (("first", 0), ("low", 5), ("high", 0)):
        run.core.send(replace(base, request_id=name, priority=priority))
    preempted = set()
    while run.core.has_unfinished():
        run.step()
        preempted |= {r.id for r in run.scheduler._roster.waiting.requests() if r.admitted}
    assert preempted == {"low"}


def test_numbers_have_a_bound_so_that_waiting_has_one() -> None:
    run = Run(errors_ok=True, policy="priority")
    add(run, "x", 1001)
    add(run, "y", -1000)
    run.finish()
    assert run.reason("x") == "error" and "from -1000 to 1000" in run.ends["x", 0].error
    assert run.reason("y") == "length"
