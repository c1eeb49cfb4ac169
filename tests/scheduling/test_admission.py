"""Who is let in, who yields, and when an ending token counts: small cases worked out by hand."""

from __future__ import annotations

import pytest
from engine_oracle import drawn
from harness import Run

from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import SamplingParams


def resumed_group(num_blocks: int) -> Run:
    """B=2, a prompt of 3 and two samples of 2 tokens, preempted: 5 tokens each are known.

    Blocks: one that the samples have in common, then two for each: 5 in all.
    """
    run = Run(num_blocks, 2, budget=16, prefix_caching=False)
    run.add("group", [1, 2, 3], seed=4, n=2, temperature=1.0, max_tokens=3)
    run.step()
    run.step()
    assert [len(run.tokens["group", i]) for i in range(2)] == [2, 2]
    assert run.preempt("group")
    return run


def test_a_resumed_group_is_let_in_where_it_just_fits() -> None:
    run = resumed_group(5)
    run.step()
    assert len(run.request("group").branches) == 2
    run.finish()
    assert [run.ends["group", i].error for i in range(2)] == [None, None]
    assert run.scheduler.stats.num_preemptions == 1


def test_a_resumed_group_waits_for_its_last_block() -> None:
    """Of 6 blocks an earlier request holds 2 when the group comes back: 4 are one too few."""
    run = Run(6, 2, budget=16, prefix_caching=False)
    run.add("other", [9], max_tokens=4)
    run.add("group", [1, 2, 3], seed=4, n=2, temperature=1.0, max_tokens=3)
    run.step()
    run.step()
    assert run.preempt("group")
    while run.request("other") is not None:
        run.step()
        assert run.request("other") is None or not run.request("group").branches
    run.finish()
    assert run.scheduler.stats.num_preemptions == 1


def test_the_newest_yields_and_the_oldest_is_never_sent_back() -> None:
    run = Run(6, 1, max_num_seqs=3, prefix_caching=False)
    victims = []
    preempt = run.scheduler._roster.preempt
    run.scheduler._roster.preempt = lambda request, *how: (
        victims.append(request.id),
        preempt(request, *how),
    )
    for name in ("old", "middle", "new"):
        run.add(name, [ord(name[0]) % 50], max_tokens=4)
    run.finish()
    assert victims[0] == "new" and "old" not in victims
    assert list(run.ends) == [("old", 0), ("middle", 0), ("new", 0)]


def test_pages_run_out_for_all_in_the_same_step() -> None:
    """sglang#4602, PR#9989, #9982: room was counted in tokens, every next token needed a page.

    P=4, B=8: four requests fill their one block in the same step, and none is free.
    """
    run = Run(4, 8, budget=32, prefix_caching=False)
    for i in range(4):
        run.add(str(i), [i + 1] * 6, max_tokens=6)
    for _ in range(3):
        run.step()
    assert run.manager.num_free_blocks == 0
    run.step()
    assert run.scheduler.stats.num_preemptions == 2
    run.finish()
    assert all(len(run.tokens[str(i), 0]) == 6 for i in range(4))


@pytest.mark.parametrize("at_least", [0, 1, 2, 3, 4])
def test_the_first_token_that_may_end_a_sample_is_the_one_after_min_tokens(at_least: int) -> None:
    """All tokens but one end it: that one is drawn `at_least` times, then an ending one."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=9,
        min_tokens=at_least,
        stop_token_ids=tuple(range(1, 50)),
    )
    run = Run()
    add = Add("a", (4, 5, 7), params, 0.0, 0)
    run.core.send(add)
    run.finish()
    tokens = run.tokens["a", 0]
    assert tokens[:-1] == [0] * at_least and tokens[-1] != 0
    assert (tuple(tokens), "stop", tokens[-1]) == drawn(add, 0, (), 200)


def test_who_left_the_queue_is_forgotten_while_the_first_still_waits() -> None:
    """The first in the queue does not fit yet; behind it requests come and are aborted."""
    run = Run(4, 4, budget=16, max_model_len=16)
    run.add("running", [1, 2, 3], max_tokens=13)
    run.step()
    run.add("first", [5] * 13, max_tokens=1)
    for i in range(1000):
        run.add(f"behind{i}", [6, 7], max_tokens=1)
        run.abort(f"behind{i}")
        if i % 100 == 99:
            run.step()
    assert not run.request("first").branches and len(run.scheduler) == 2
    assert len(run.scheduler._roster.waiting.line(None)) < 100
    run.finish()
    assert run.reason("first") == "length"
