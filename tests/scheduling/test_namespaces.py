"""Who shares K/V with whom, and that nobody learns more than that."""

from __future__ import annotations

import pytest
from harness import VOCAB, Run
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.cache import BlockManager
from pagedkv.errors import ConfigError, RequestError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.namespaces import namespace_bytes, public_length
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.scheduler import Scheduler

names = st.none() | st.text(alphabet="ab\0\1", max_size=4)
TEXT = list(range(1, 14))
PUBLIC, OWN = tuple(TEXT[:4]), TEXT[4:]


@given(names, names, names, names)
def test_no_two_pairs_have_the_same_namespace(tenant, salt, other_tenant, other_salt):
    same = (tenant, salt) == (other_tenant, other_salt)
    assert (namespace_bytes(tenant, salt) == namespace_bytes(other_tenant, other_salt)) == same


@pytest.mark.parametrize(
    ("one", "other"),
    [(("a", "bc"), ("ab", "c")), ((None, "a"), ("a", None)), ((None, ""), ("", None))],
)
def test_pairs_that_run_together_differ(one, other):
    assert namespace_bytes(*one) != namespace_bytes(*other)


def test_a_salt_separates_within_a_tenant():
    run = Run(budget=64)
    for name, tenant, salt in (
        ("a", "t", None),
        ("b", "t", "s"),
        ("c", "u", "s"),
        ("b again", "t", "s"),
        ("a again", "t", None),
    ):
        run.add(name, TEXT, max_tokens=1, tenant=tenant, cache_salt=salt)
        run.finish()
    assert [run.cached(name) for name in ("a", "b", "c", "b again", "a again")] == [0, 0, 0, 12, 12]


def test_only_whole_public_prefixes_count_and_the_longest_wins():
    prefixes = ((1, 2), (1, 2, 3, 4), (9,))
    assert public_length((1, 2, 3, 4, 5), prefixes) == 4
    assert public_length((1, 2, 3, 5), prefixes) == 2
    assert public_length((1, 9), prefixes) == 0
    assert public_length((1, 2, 3, 4), prefixes) == 4


def test_a_public_prefix_is_shared_by_all_tenants_and_nothing_else_is():
    run = Run(budget=64, public_prefixes=(tuple(TEXT[:10]),))
    for name, tenant in (("a", "t"), ("b", "u"), ("a again", "t")):
        run.add(name, TEXT, max_tokens=1, tenant=tenant)
        run.finish()
    # Two whole blocks of the ten tokens; the third block has tokens of the tenant's own.
    assert [run.cached(name) for name in ("a", "b", "a again")] == [0, 8, 12]


def test_tenants_wait_for_a_public_prefix_and_for_no_more():
    run = Run(budget=64, public_prefixes=(tuple(TEXT[:8]),))
    for tenant in "xyz":
        run.add(tenant, TEXT, max_tokens=1, tenant=tenant)
    run.finish()
    assert [step.query_lens.tolist() for step in run.steps] == [[13], [5, 5]]


def test_public_blocks_are_found_again_after_a_preemption():
    run = Run(budget=64, public_prefixes=(tuple(TEXT[:8]),))
    run.add("a", TEXT, max_tokens=4, tenant="t")
    run.step()
    assert run.preempt("a")
    run.step()
    assert run.steps[-1].query_lens.tolist() == [1]  # what was drawn
    run.finish()


def test_prompt_logprobs_are_computed_within_the_tenant():
    run = Run(budget=64, public_prefixes=(tuple(TEXT[:8]),))
    run.add("a", TEXT, max_tokens=1, tenant="t", prompt_logprobs=1)
    run.finish()
    run.add("b", TEXT, max_tokens=1, tenant="u")
    run.finish()
    assert run.cached("b") == 0


def traffic(private: list[int], before: bool) -> tuple[list[int], list[list[int]]]:
    """Hits of one tenant, and what every step computes, beside another tenant's private text.

    before: the other tenant's requests have ended before; otherwise they run at the same time.
    """
    run = Run(num_blocks=200, budget=8, max_num_seqs=4, public_prefixes=(PUBLIC,))
    run.add("public", [*PUBLIC, 5], max_tokens=1, tenant="operator")
    run.finish()
    for i in range(3):
        run.add(f"foreign {i}", [*PUBLIC, *private, i], max_tokens=3, tenant="b", cache_salt="s")
    if before:
        run.finish()
    for i in range(3):
        run.add(f"own {i}", [*PUBLIC, *OWN, i], max_tokens=3, tenant="a", cache_salt="s")
    run.finish()
    lens = [step.query_lens.tolist() for step in run.steps]
    return [run.cached(f"own {i}") for i in range(3)], lens


@pytest.mark.parametrize("before", [True, False])
def test_what_a_tenant_computes_does_not_depend_on_the_private_text_of_another(before):
    """Row by row and step by step; the other's text is the same, or another of its length."""
    assert traffic(OWN, before) == traffic([20 + token for token in OWN], before)


@pytest.mark.parametrize("name", ["tenant", "cache_salt"])
@pytest.mark.parametrize("value", [5, b"x", "", "\ud800"])
def test_names_that_are_none_are_refused(name, value):
    scheduler = Scheduler(BlockManager(8, 4), SchedulerConfig(4, 8, 30, (), VOCAB))
    with pytest.raises(RequestError, match=name):
        scheduler.validate(Add("a", (1,), SamplingParams(), 0.0, 0, **{name: value}))


@pytest.mark.parametrize("prefixes", [[(1,)], ((),), ((1, "a"),), ((VOCAB,),), ((-1,),), ([1],)])
def test_public_prefixes_that_are_none_are_refused(prefixes):
    with pytest.raises(ConfigError, match="public_prefixes"):
        SchedulerConfig(4, 8, 30, (), VOCAB, prefixes)
