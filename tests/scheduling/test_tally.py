"""What is counted for operators: each number against one that is known beforehand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import Run, numbers

from pagedkv.engine.status import core_status
from pagedkv.engine.toy import ToyExecutor, payload_bytes
from pagedkv.engine.wire import Batch, pack, unpack_from_core
from pagedkv.scheduling.counters import Attainment, EngineCounters, TenantCounters
from pagedkv.scheduling.messages import ERROR_TYPES, RequestUsage
from pagedkv.scheduling.step import Result, Step, Ticket
from pagedkv.scheduling.tally import MAX_TENANTS, OTHER_TENANTS, Tally
from pagedkv.tiers.host import HostTier


def counters(run: Run) -> EngineCounters:
    return core_status(run.core).counters


def tenant(run: Run, name: str | None = None) -> TenantCounters:
    return next(t for t in counters(run).tenants if t.tenant == name)


class Slow(ToyExecutor):
    """Says that each step took a second, half of it for drawing tokens."""

    def collect(self, ticket: Ticket) -> Result:
        return replace(super().collect(ticket), duration=1.0, sample_duration=0.5)


# ---- what a request has taken


def usage(run: Run, name: str, sample: int = 0) -> RequestUsage | None:
    return run.ends[name, sample].usage


def test_usage_comes_once_with_the_last_delta() -> None:
    run = Run()
    run.add("a", range(6), n=3, max_tokens=3, temperature=1.0)
    run.finish()
    carriers = [delta for delta in run.deltas if delta.usage is not None]
    assert carriers == [run.deltas[-1]]


def test_blocks_of_a_lone_sample_are_those_of_its_tokens() -> None:
    run = Run(block_size=4, budget=3)
    run.add("a", range(9), max_tokens=4)  # the last token is drawn and not computed
    run.finish()
    assert usage(run, "a") == RequestUsage(blocks_peak=3)


def test_blocks_that_samples_share_count_once() -> None:
    run = Run(block_size=4)
    run.add("a", range(8), n=3, temperature=1.0, max_tokens=4)
    run.finish()
    taken = usage(run, "a", 2)
    assert taken is not None and taken.blocks_peak == 2 + 3  # the prompt, and a tail for each


def test_equal_samples_merge_their_blocks_and_the_peak_is_before() -> None:
    run = Run(block_size=4)
    run.add("a", range(8), n=2, max_tokens=5)  # greedy: both draw the same tokens
    run.finish()
    taken = usage(run, "a", 1)
    assert taken is not None and taken.blocks_peak == 4  # at the end there are 3


def test_a_preempted_request_says_what_that_has_cost() -> None:
    run = Run(block_size=4, prefix_caching=False)
    run.add("a", range(10), max_tokens=6)
    for _ in range(3):
        run.step()
    assert run.preempt("a")
    run.finish()
    # 10 tokens of the prompt and one of two drawn had been computed.
    assert usage(run, "a") == RequestUsage(blocks_peak=4, preemptions=1, recomputed_tokens=11)
    assert counters(run).recomputed_tokens == 11


def test_tokens_found_again_are_no_prefix_hit_and_not_computed_again() -> None:
    """K11: what a request finds of its own after a preemption is counted apart."""
    run = Run(block_size=4)
    run.add("a", range(10), max_tokens=6)
    for _ in range(3):
        run.step()
    assert run.preempt("a")
    run.finish()
    assert usage(run, "a") == RequestUsage(blocks_peak=4, preemptions=1)
    seen = counters(run)
    assert seen.prefix_cache_queries == 10 and seen.prefix_cache_hits == (("device", 0),)
    assert seen.readmission_queries == 12 and seen.readmission_hits == (("device", 11),)


def test_distinct_prompts_in_a_small_pool_hit_nothing() -> None:
    """K11: preemptions and all."""
    run = Run(num_blocks=6, block_size=4, budget=16, admission="first_chunk")
    for i in range(4):
        run.add(f"{i}", range(10 * i, 10 * i + 7), max_tokens=10)
    run.finish()
    seen = counters(run)
    assert run.scheduler.stats.num_preemptions > 0
    assert seen.prefix_cache_queries == 28 and seen.prefix_cache_hits == (("device", 0),)
    assert all(end.usage is not None and not end.usage.cached_tokens for end in run.ends.values())


def test_blocks_brought_back_from_below_are_counted() -> None:
    size = payload_bytes(4)
    tier = HostTier(100 * size, size)
    run = Run(6, 4, 16, prefix_caching=False, tier=tier, recovery="swap", admission="first_chunk")
    for i in range(3):
        run.add(f"{i}", [i] * 7, max_tokens=12)
    swapped_out = 0
    while run.core.has_unfinished():
        run.step()
        swapped_out = max(swapped_out, run.status.num_swapped_out)
    seen = counters(run)
    assert swapped_out > 0 and seen.blocks_loaded > 0
    # Without a prefix cache nothing else is loaded.
    taken = [end.usage for end in run.ends.values() if end.usage is not None]
    assert sum(t.swapped_blocks for t in taken) == seen.blocks_loaded
    assert seen.swap_bytes_out == seen.blocks_stored * size
    assert seen.swap_bytes_in == seen.blocks_loaded * size
    assert sum(n for kind, _, n in seen.preemptions if kind == "swap") == sum(
        t.preemptions for t in taken
    )


def test_hits_are_counted_by_the_tier_that_had_them() -> None:
    """A block of the host's and one that comes from below it."""
    size = payload_bytes(4)
    below = HostTier(100 * size, size)
    tier = HostTier(size, size, below)  # has the block that was stored last
    run = Run(block_size=4, tier=tier, recovery="swap")
    run.scheduler.tally._tiers = ("device", "host", "disk")
    run.add("first", range(9), max_tokens=1)
    run.finish()
    run.core.reset_prefix_cache()
    run.add("second", range(9), max_tokens=1)
    run.finish()
    taken = usage(run, "second")
    assert taken is not None and taken.cached_tokens == 8 and taken.swapped_blocks == 0
    assert counters(run).prefix_cache_queries == 18
    assert sum(n for _, n in counters(run).prefix_cache_hits) == 8
    assert dict(counters(run).prefix_cache_hits)["disk"] > 0


# ---- kinds of errors


class Broken(ToyExecutor):
    """Fails as a whole in the step of `at`, or in its first row."""

    def __init__(self, at: int, row: bool = False) -> None:
        super().__init__(64, 4)
        self.at, self.row = at, row

    def submit(self, step: Step) -> Ticket:
        if step.index == self.at and not self.row:
            raise RuntimeError("boom")
        return super().submit(step)

    def collect(self, ticket: Ticket) -> Result:
        result = super().collect(ticket)
        return replace(result, errors={0: "bad"}) if self.row and ticket == self.at else result


@pytest.mark.parametrize("row", [False, True])
def test_what_the_executor_does_is_the_engines_fault(row: bool) -> None:
    run = Run(executor=Broken(1, row), errors_ok=True)
    run.add("a", [1, 2], max_tokens=4)
    run.finish()
    assert run.ends["a", 0].error_type == "engine" and usage(run, "a") == RequestUsage(0, 1)
    assert dict(counters(run).requests_finished)["error"] == 1


def test_refusals_say_of_what_kind_they_are_and_take_nothing() -> None:
    run = Run(max_num_seqs=1, max_num_waiting=1, errors_ok=True)
    run.add("runs", [1], max_tokens=9)
    run.step()
    run.add("waits", [1], max_tokens=1)
    run.add("full", [1], max_tokens=1)
    run.add("long", [1] * 200, max_tokens=1)
    run.step()
    run.scheduler.drain()
    run.add("late", [1], max_tokens=1)
    run.finish()
    kinds = [run.ends[name, 0].error_type for name in ("runs", "waits", "full", "long", "late")]
    assert kinds == [None, None, "overload", "invalid", "draining"]
    assert run.ends["full", 0].usage is None
    expected = {"overload": 1, "invalid": 1, "draining": 1}
    assert counters(run).requests_refused == tuple((k, expected.get(k, 0)) for k in ERROR_TYPES)
    assert counters(run).requests_added == 2


def test_a_deadline_that_passes_is_its_own_kind() -> None:
    run = Run(errors_ok=True)
    run.add("a", [1, 2], max_tokens=9, deadline=0.5)
    run.step()
    run.now = 1.0
    run.finish()
    assert run.ends["a", 0].error_type == "deadline"
    assert tenant(run).deadlines == (0, 1)


# ---- the queue


def test_n_counts_n_in_a_full_queue() -> None:
    """K6: a request of three samples takes three places."""
    run = Run(max_num_seqs=4, max_num_waiting=4, errors_ok=True)
    run.add("runs", [1], n=4, temperature=1.0, max_tokens=9)
    run.step()
    run.add("three", [1, 2], n=3, temperature=1.0, max_tokens=1)
    run.add("two", [1, 2], n=2, temperature=1.0, max_tokens=1)
    run.add("one", [1, 2], max_tokens=1)
    run.step()
    refused = run.ends["two", 0].error
    assert refused is not None and "3 requests wait and max_num_waiting=4" in refused
    assert "counts 2" in refused and ("two", 1) in run.ends
    assert run.status.num_waiting == 2 and run.status.waiting_samples == 4
    run.finish()
    assert run.reason("one") == run.reason("three", 2) == "length"


# ---- counters


def test_tokens_and_requests_are_counted_by_tenant() -> None:
    run = Run()
    run.add("a", range(7), tenant="x", max_tokens=3)
    run.add("b", range(7), tenant="y", n=2, temperature=1.0, max_tokens=2)
    run.finish()
    assert (tenant(run, "x").prompt_tokens, tenant(run, "x").generation_tokens) == (7, 3)
    assert (tenant(run, "y").prompt_tokens, tenant(run, "y").generation_tokens) == (7, 4)
    seen = counters(run)
    assert (seen.prompt_tokens, seen.generation_tokens, seen.requests_added) == (14, 7, 2)
    assert dict(seen.requests_finished) == {
        "stop": 0,
        "length": 2,
        "abort": 0,
        "error": 0,
        "deadline": 0,
    }


def test_a_prompt_that_is_given_up_counts_as_far_as_it_got() -> None:
    run = Run(budget=4)
    run.add("a", range(20), max_tokens=1)
    run.step()
    run.step()
    run.abort("a")
    run.finish()
    assert tenant(run).prompt_tokens == 8
    assert dict(counters(run).requests_finished)["abort"] == 1


def test_slos_are_judged_at_the_end_of_the_step_that_draws() -> None:
    run = Run(executor=Slow(64, 4))
    run.add("late", [1, 2], ttft_slo=0.9, tpot_slo=0.9, deadline=1.5, max_tokens=3)
    run.add("in_time", [1, 2], ttft_slo=1.1, tpot_slo=1.1, deadline=3.5, max_tokens=3)
    run.add("aborted", [1, 2], ttft_slo=1.1, tpot_slo=0.1, deadline=3.5, max_tokens=9)
    for step in range(3):
        run.now = float(step)
        run.step()
    run.abort("aborted")
    run.finish()
    # They came at 0, 1 and 2; the tokens of all are there at 1, 2 and 3.
    assert tenant(run).ttft == (2, 1)
    assert tenant(run).tpot == (1, 1)
    assert tenant(run).deadlines == (1, 1)


def test_late_tenants_share_counters() -> None:
    tally = Tally()
    for i in range(MAX_TENANTS + 10):
        tally.account(f"{i}").requests += 1
    tally.account("0").requests += 1
    names = [t.tenant for t in tally._tenants.values()]
    assert len(names) == MAX_TENANTS + 1 and names[-1] == OTHER_TENANTS
    assert tally.account("0").requests == 2
    assert tally.account(f"{MAX_TENANTS + 3}").requests == 10


def test_preemptions_are_counted_by_kind_and_reason() -> None:
    run = Run(num_blocks=6, block_size=4, budget=16, prefix_caching=False, admission="first_chunk")
    for i in range(3):
        run.add(f"{i}", [i] * 7, max_tokens=12)
    run.finish()
    by_kind = {(kind, reason): n for kind, reason, n in counters(run).preemptions if n}
    assert by_kind == {("recompute", "growth"): run.scheduler.stats.num_preemptions}
    assert by_kind["recompute", "growth"] > 0


def test_evicted_blocks_are_counted() -> None:
    run = Run(num_blocks=4, block_size=4)
    for i in range(3):
        run.add(f"{i}", [i] * 9, max_tokens=1)
        run.finish()
    evicted = counters(run).blocks_evicted
    run.manager.evict(1)
    assert evicted > 0 and counters(run).blocks_evicted == evicted + 1


# ---- gauges


def test_everything_aborted_at_once_leaves_nothing_in_the_gauges() -> None:
    """K10: in whatever state the requests are."""
    run = Run(num_blocks=8, block_size=4, max_num_seqs=3)
    for i in range(6):
        run.add(f"{i}", range(i, i + 5), n=1 + i % 2, temperature=1.0, max_tokens=9, tenant=f"t{i}")
    for _ in range(3):
        run.step()
    assert run.status.num_running and run.status.num_waiting and run.status.blocks_held
    for i in range(6):
        run.abort(f"{i}")
    run.step()
    now = core_status(run.core)
    assert now.num_running == now.num_waiting == now.running_samples == now.waiting_samples == 0
    assert now.waiting_tokens == now.blocks_held == now.blocks_shared == now.unfilled_slots == 0
    assert now.kv_cache_usage == 0.0 and now.tenants == ()
    assert dict(now.counters.requests_finished)["abort"] == 6
    assert min(numbers(now.counters)) >= 0


def test_usage_of_the_pool_stays_within_bounds_while_blocks_drain() -> None:
    run = Run(num_blocks=8, block_size=4)
    run.add("a", range(10), max_tokens=9)
    run.step()
    run.step()
    lease = run.manager.lease(run.manager.block_table(run.scheduler.sequences[0])[:2])
    run.abort("a")
    run.step()
    assert (run.status.blocks_draining, run.status.blocks_held) == (2, 0)
    assert run.status.kv_cache_usage == 0.25
    lease.release()
    run.check_idle()


def test_a_tail_that_samples_share_is_waste_once() -> None:
    run = Run(block_size=4)
    run.add("a", range(6), n=2, temperature=1.0, max_tokens=3)
    run.step()
    # The prompt has been computed and forked; nobody has written behind it yet.
    assert run.status.blocks_held == 2 and run.status.blocks_shared == 2
    assert run.status.unfilled_slots == 2
    run.finish()


def test_a_request_that_leaves_is_swapped_out_no_more() -> None:
    size = payload_bytes(4)
    run = Run(block_size=4, tier=HostTier(100 * size, size), recovery="swap")
    run.add("a", range(10), max_tokens=9)
    for _ in range(3):
        run.step()
    request = run.request("a")
    assert request is not None
    run.scheduler._roster.preempt(request, 3)
    assert core_status(run.core).num_swapped_out == 1
    run.abort("a")
    run.step()
    assert run.status.num_swapped_out == 0
    run.finish()


# ---- what the parts of a step take


def test_the_parts_of_a_step_add_up_to_what_the_clock_says() -> None:
    run = Run(executor=Slow(64, 4))
    ticks = iter(range(1000))
    run.core._clock = lambda: float(next(ticks))
    run.add("a", [1, 2], max_tokens=1)
    run.step()
    stats = run.stats[0]
    assert stats.schedule_seconds == stats.deliver_seconds == 1.0
    assert (stats.execute_seconds, stats.sample_seconds) == (0.5, 0.5)


def test_without_a_clock_the_parts_of_a_step_are_nothing() -> None:
    run = Run()
    run.add("a", [1, 2], max_tokens=1)
    run.step()
    stats = run.stats[0]
    assert stats.schedule_seconds == stats.deliver_seconds == stats.execute_seconds == 0.0


# ---- on their way to a front


def test_figures_come_to_another_process_as_they_are() -> None:
    run = Run(num_blocks=6, block_size=4, budget=16, prefix_caching=False, admission="first_chunk")
    for i, name in enumerate(("x", None, "y")):
        run.add(f"{i}", [i] * 7, tenant=name, ttft_slo=1.0, deadline=9.0, max_tokens=12)
    for _ in range(6):
        run.step()
    batch = Batch(tuple(run.deltas), run.stats[-1], 3, run.status)
    assert run.status.tenants and run.status.counters.tenants
    received = unpack_from_core(pack(batch))
    assert received == batch and isinstance(received.status.counters.tenants[0].ttft, Attainment)
    run.finish()
    last = Batch(tuple(d for d in run.deltas if d.usage), None, 3, run.status)
    assert len(last.deltas) == 3 and unpack_from_core(pack(last)) == last
