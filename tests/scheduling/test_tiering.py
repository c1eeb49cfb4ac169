"""Blocks that go below the device and come back: what is moved, and that no token changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import Run, solo
from hypothesis import given, settings
from hypothesis import strategies as st
from test_beams import EOS, alone, found
from test_beams import add as add_beams

from pagedkv.engine.toy import payload_bytes
from pagedkv.scheduling.cost import StepFeatures
from pagedkv.scheduling.params import BeamSearchParams
from pagedkv.tiers.host import HostTier

SIZE = 4


def host(blocks: int, size: int = SIZE) -> HostTier:
    return HostTier(blocks * payload_bytes(size), payload_bytes(size))


def tiered(num_blocks: int, tier: HostTier | None = None, **options) -> Run:
    return Run(num_blocks, SIZE, tier=tier or host(1000), **options)


def moved(run: Run) -> tuple[int, int]:
    stats = run.scheduler.tiering.stats
    return stats.stored, stats.loaded


def test_full_blocks_are_stored_behind_and_loaded_when_the_device_has_lost_them():
    run = tiered(8)
    prompt = range(1, 18)  # four full blocks, and a token
    run.add("first", prompt, max_tokens=1)
    run.finish()
    assert moved(run) == (4, 0)
    run.manager.reset_cache()
    run.add("second", prompt, max_tokens=1)
    run.finish()
    assert moved(run) == (4, 4)
    assert run.cached("second") == 16
    assert sum(step.num_tokens for step in run.steps) == 17 + 1
    assert run.tokens["second", 0] == run.tokens["first", 0]


def test_a_load_of_many_blocks_is_no_misuse():
    """It is written in several pieces: the sanitizer once knew of the first alone."""
    run = tiered(40, sanitize=True, budget=200)
    prompt = [i % 50 for i in range(4 * 34 + 1)]
    for name in ("first", "second"):
        run.add(name, prompt, max_tokens=1)
        run.finish()
        run.manager.reset_cache()
    assert moved(run)[1] == 34
    assert run.tokens["second", 0] == run.tokens["first", 0]


def test_hits_after_a_gap_are_used():
    """The gap is computed, the rest is loaded."""
    tier = host(1000)
    run = tiered(16, tier, budget=64)
    prompt = range(1, 22)
    run.add("first", prompt, max_tokens=1)
    run.finish()
    names = list(tier._found)
    for gone in (names[0], names[2]):
        slot, _ = tier._found.pop(gone)
        tier._free.append(slot)
    run.manager.reset_cache()
    run.add("second", prompt, max_tokens=1)
    before = len(run.steps)
    run.finish()
    computed = [step.query_lens.tolist() for step in run.steps[before:] if step.num_tokens]
    assert computed == [[4], [4], [1]]
    assert [len(load.blocks) for step in run.steps for load in step.loads] == [1, 2]
    assert run.tokens["second", 0] == run.tokens["first", 0]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [5, 6, 7, 8])
def test_a_victim_comes_back_with_its_partial_tail(length, caching):
    run = tiered(6, prefix_caching=caching, budget=32)
    prompts = {"old": (1, 2, 3, 4, 5, 6), "young": tuple(range(7, 7 + length))}
    for name, prompt in prompts.items():
        run.add(name, prompt, max_tokens=14)
    run.finish()
    assert run.scheduler.stats.num_preemptions == 1
    for name, prompt in prompts.items():
        assert run.tokens[name, 0] == solo(prompt, max_tokens=14)
    computed = sum(step.num_tokens for step in run.steps)
    assert computed == sum(len(prompt) + 13 for prompt in prompts.values())  # nothing twice
    assert moved(run)[1] > 0


def test_a_block_that_cannot_be_loaded_is_computed_and_not_tried_again():
    class Lying(HostTier):
        """Says it has everything."""

        def contains(self, names):
            return [True] * len(names)

    tier = Lying(100 * payload_bytes(SIZE), payload_bytes(SIZE))
    tier.put = lambda name, tokens, data: False
    run = tiered(8, tier)
    prompt = tuple(range(1, 18))
    run.add("a", prompt, max_tokens=4)
    run.finish()
    assert run.tokens["a", 0] == solo(prompt, max_tokens=4)
    assert run.scheduler.tiering.stats.failed_loads == 4
    assert [len(load.blocks) for step in run.steps for load in step.loads] == [4]


def test_a_name_that_is_found_with_other_tokens_is_no_hit():
    class Forger(HostTier):
        def get(self, name, tokens, out):
            return super().get(name, bytes(len(tokens)), out)

    run = tiered(8, Forger(100 * payload_bytes(SIZE), payload_bytes(SIZE)))
    prompt = tuple(range(1, 18))
    for name in "ab":
        run.manager.reset_cache()
        run.add(name, prompt, max_tokens=4)
        run.finish()
        assert run.tokens[name, 0] == solo(prompt, max_tokens=4)
    assert moved(run)[1] == 0


def test_tenants_do_not_find_each_others_blocks_below():
    run = tiered(16)
    prompt = range(1, 18)
    for tenant in ("a", "b", "a"):
        run.manager.reset_cache()
        run.add(f"{tenant}{run.sent}", prompt, tenant=tenant, max_tokens=1)
        run.finish()
    assert run.cached("b1") == 0
    assert run.cached("a2") == 16


def test_a_failed_step_ends_leases_and_reservations():
    run = tiered(16, errors_ok=True)
    run.add("a", range(1, 18), max_tokens=1)
    run.finish()
    run.manager.reset_cache()
    run.add("again", range(1, 18), max_tokens=1)
    run.add("b", range(20, 30), max_tokens=3)
    submit, run.recorder.executor = run.recorder.executor, Failing()
    run.step()
    run.recorder.executor = submit
    run.finish()
    assert run.reason("again") == "length" and run.reason("b") == "error"


class Failing:
    def submit(self, step):
        raise RuntimeError("no")


class Async:
    """Lets loads and stores end `delay` steps later, or when nothing else is left to do."""

    def __init__(self, inner, delay: int) -> None:
        self.inner, self.delay, self.late = inner, delay, []

    def submit(self, step):
        return self.inner.submit(step)

    def collect(self, ticket):
        result = self.inner.collect(ticket)
        self.late.append(result.transfers)
        wait = len(self.late) > self.delay or not len(result.indptr) > 1
        now = self.late.pop(0) if wait and self.late else ()
        return replace(result, transfers=now)


@st.composite
def workloads(draw):
    """(prompt, output tokens, samples, steps to run then, whether to abort, blocks to evict)."""
    requests = []
    for _ in range(draw(st.integers(2, 6))):
        shared = draw(st.integers(0, 10))
        own = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
        samples = draw(st.integers(1, 2)) if len(own) < 4 else 1
        output, steps = draw(st.integers(1, 8)), draw(st.integers(0, 3))
        abort, evict = draw(st.integers(0, 9)) == 0, draw(st.sampled_from([0, 0, 0, 1, 4]))
        requests.append(((*range(1, 1 + shared), *own), output, samples, steps, abort, evict))
    return requests


@settings(deadline=None, max_examples=60)
@given(
    workload=workloads(),
    blocks=st.integers(6, 14),
    host_blocks=st.sampled_from([1, 3, 8, 100]),
    budget=st.sampled_from([2, 5, 16]),
    caching=st.booleans(),
    sanitize=st.booleans(),
    delay=st.sampled_from([0, 0, 1, 2]),
)
def test_tiers_change_no_token_and_leak_nothing(
    workload, blocks, host_blocks, budget, caching, sanitize, delay
):
    """Small pools, groups, aborts, tiers that lose blocks, late transfers."""
    run = tiered(
        blocks,
        host(host_blocks),
        budget=budget,
        max_num_seqs=4,
        prefix_caching=caching,
        sanitize=sanitize,
    )
    run.recorder.executor = Async(run.toy, delay)
    for i, (prompt, output, samples, steps, abort, evict) in enumerate(workload):
        run.add(f"r{i}", prompt, n=samples, max_tokens=output)
        for _ in range(steps):
            run.step()
        if abort:
            run.abort(f"r{i}")
        run.manager.evict(evict)
    run.finish()
    for i, (prompt, output, samples, _, abort, _) in enumerate(workload):
        for sample in range(samples):
            if not abort and run.ends[f"r{i}", sample].error is None:
                assert run.tokens[f"r{i}", sample] == solo(prompt, max_tokens=output)


def test_beams_wait_together_for_blocks_that_are_on_their_way_out():
    """Once some of them went on without the others, and were compared as if they were all."""
    beam = BeamSearchParams(beam_width=3, max_tokens=9)
    run = Run(9, 3, tier=host(1000, 3), budget=16, eos=EOS)
    add_beams(run, "beams", [1, 2, 3, 4, 5], beam)
    run.add("other", (20, 21, 22), max_tokens=12, ignore_eos=True)
    run.finish()
    assert run.scheduler.stats.num_preemptions > 0 and moved(run)[0] > 0
    assert found(run, "beams", 3) == alone([1, 2, 3, 4, 5], beam)


def test_a_link_of_which_nothing_is_known_is_tried_with_a_few_blocks():
    run = tiered(16, prefix_caching=False, budget=64)
    for tokens in range(1, 21):
        run.scheduler.cost.observe(StepFeatures(tokens, 0, 0.0), 0.001 * tokens)
    for name, first in (("first", 1), ("second", 2)):
        prompt = tuple(range(first, first + 33))
        run.add(name, prompt, max_tokens=3)
        run.step()
        run.scheduler._roster.preempt(run.request(name), 9)
        run.finish()
        assert run.tokens[name, 0] == solo(prompt, max_tokens=3)
    stores = [len(store.blocks) for step in run.steps for store in step.stores]
    assert stores == [4, 9]


def test_an_abort_between_look_up_and_admission_holds_nothing_below():
    """vllm#44100: what a request had looked up in an outer tier stayed locked when it left."""
    names = []

    class Noting(HostTier):
        def put(self, name, tokens, data):
            names.append(name)
            return super().put(name, tokens, data)

    tier = Noting(7 * payload_bytes(SIZE), payload_bytes(SIZE))
    run = tiered(8, tier)
    run.add("before", range(1, 18), max_tokens=1)
    run.finish()
    looked_up = names[:4]
    run.manager.reset_cache()
    run.add("full", range(20, 44), max_tokens=6)
    run.step()
    run.add("a", range(1, 18), max_tokens=4)  # its four blocks are below, and find no room
    run.step()
    assert not run.request("a").branches and tier.contains(looked_up) == [True] * 4
    run.abort("a")
    run.step()
    assert run.reason("a") == "abort"
    run.finish()
    assert moved(run) == (11, 0) and tier.contains(looked_up) == [False] * 4
