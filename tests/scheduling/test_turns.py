"""A tenant within its share beside one that is not: whose prefill goes first."""

from __future__ import annotations

import pytest
from harness import Run

FAIR = ("fair", "fair+prefix")


def chunk(run: Run, name: str) -> int:
    """Tokens of a running request in the last step."""
    request = run.request(name)
    assert request is not None
    step = run.recorder.steps[-1]
    seqs = [branch.seq for branch in request.branches]
    return sum(n for s, n in zip(step.seqs, step.query_lens.tolist(), strict=True) if s in seqs)


@pytest.mark.parametrize("policy", FAIR)
def test_within_its_share_a_prefill_goes_before_older_ones_of_who_is_not(policy: str) -> None:
    """Steps of 8 tokens; `a` holds 130 of 256 slots. `b` takes two steps, not four."""
    run = Run(policy=policy)
    run.add("a", [1] * 130, tenant="a", max_tokens=1)
    run.step()
    run.add("b", [2] * 15, tenant="b", max_tokens=1)
    run.step()
    assert (chunk(run, "a"), chunk(run, "b")) == (1, 7)
    assert [delta.request_id for delta in run.step() if delta.token_ids] == ["b"]
    run.finish()


def test_two_tenants_within_their_shares_prefill_side_by_side() -> None:
    run = Run(policy="fair")
    run.add("a", [1] * 100, tenant="a", max_tokens=1)
    run.step()
    run.add("b", [2] * 15, tenant="b", max_tokens=1)
    run.step()
    assert (chunk(run, "a"), chunk(run, "b")) == (4, 4)
    run.finish()


def test_what_is_left_to_one_that_cannot_start_is_used_after_all() -> None:
    """The only seat is taken."""
    run = Run(max_num_seqs=1, policy="fair")
    run.add("a", [1] * 130, tenant="a", max_tokens=1)
    run.step()
    run.add("b", [2] * 15, tenant="b", max_tokens=1)
    run.step()
    assert chunk(run, "a") == 8
    run.finish()
