"""What each mode of admission lets in, the watermark, and the bounds of the queue."""

from __future__ import annotations

import pytest
from harness import Run
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.errors import ConfigError, OverloadError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.forecast import Forecast
from pagedkv.scheduling.lengths import MIN_LENGTHS
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.peak import peak_blocks


def running(run: Run) -> list[str]:
    return [request.id for request in run.scheduler._roster.running]


def let_in(run: Run) -> list[str]:
    """Who runs after the first step; then all end."""
    run.step()
    names = running(run)
    run.finish()
    return names


def learnt(run: Run, length: int, tenant: str | None = None) -> None:
    """Outputs of the tenant have been `length` tokens long."""
    for _ in range(MIN_LENGTHS):
        run.scheduler._roster.lengths.record(tenant, length)


# ---- modes


def two_prompts(admission: str) -> Run:
    """P=5, B=4, budget 8: prompts of 16 and 8 tokens take 4 and 2 blocks, one too many."""
    run = Run(5, 4, 8, prefix_caching=False, admission=admission)
    run.add("long", [1] * 16, max_tokens=3)
    run.add("short", [2] * 8, max_tokens=3)
    return run


def test_the_first_chunk_alone_is_enough_for_a_start() -> None:
    """Each computes 4 tokens of the step; as prompts, both do not fit."""
    run = two_prompts("first_chunk")
    assert let_in(run) == ["long", "short"]
    assert run.scheduler.stats.num_preemptions > 0
    assert let_in(two_prompts("prompt")) == ["long"]


def test_a_first_chunk_beside_which_nothing_is_left_does_not_start() -> None:
    """P=2, B=4: the decode holds 1 block and takes the other in this step."""
    run = Run(2, 4, 8, prefix_caching=False, admission="first_chunk")
    run.add("decode", [1] * 4, max_tokens=2)
    run.step()
    run.add("next", [2], max_tokens=1)
    run.step()
    assert run.reason("decode") == "length" and running(run) == []
    run.finish()
    assert run.scheduler.stats.num_preemptions == 0


def two_growing(admission: str, num_blocks: int) -> Run:
    """B=2: prompts of 2 tokens and 5 more each, the last of which is not kept: 3 blocks each."""
    run = Run(num_blocks, 2, 8, prefix_caching=False, admission=admission)
    for name in ("a", "b"):
        run.add(name, [3, 4], max_tokens=5)
    return run


def test_with_max_tokens_a_request_starts_where_its_whole_output_fits() -> None:
    assert let_in(two_growing("max_tokens", 6)) == ["a", "b"]
    run = two_growing("max_tokens", 5)
    assert let_in(run) == ["a"]
    assert run.scheduler.stats.num_preemptions == 0
    assert let_in(two_growing("prompt", 5)) == ["a", "b"]


def test_a_request_that_may_outgrow_the_pool_runs_alone() -> None:
    """B=1, P=4: two samples of 1 + 9 tokens do not fit; then comes the next one."""
    run = Run(4, 1, 8, prefix_caching=False, admission="max_tokens")
    run.add("large", [1], n=2, temperature=1.0, max_tokens=9)
    run.add("small", [3], max_tokens=1)
    assert let_in(run) == ["large"]
    assert run.ends["large", 1].error and len(run.tokens["large", 0]) == 4
    assert run.scheduler.stats.num_preemptions == 0


@pytest.mark.parametrize(("length", "names"), [(3, ["a", "b"]), (5, ["a"])])
def test_the_expected_length_decides(length: int, names: list[str]) -> None:
    """P=5, B=2: outputs of 3 keep 2 + 2 tokens, 2 blocks each; of 5 they take 3 each."""
    run = Run(5, 2, 8, prefix_caching=False, admission="expected_peak")
    learnt(run, length)
    for name in ("a", "b"):
        run.add(name, [3, 4], max_tokens=5)
    assert let_in(run) == names


def test_lengths_are_those_of_the_own_tenant_and_are_learnt_from_its_ends() -> None:
    run = Run(64, 2, 64, admission="expected_peak")
    for i in range(MIN_LENGTHS):
        run.add(f"a{i}", [i + 1], tenant="a", max_tokens=2)
    run.add("b", [9], tenant="b", max_tokens=20)
    run.step()
    run.abort("b")
    run.finish()
    lengths = run.scheduler._roster.lengths
    assert lengths.expected("a", 0, 50, 0.9) == 2
    assert lengths.expected("b", 0, 50, 0.9) == 50
    assert lengths._recent == {"a": [2] * MIN_LENGTHS}


def test_those_who_end_sooner_leave_their_blocks_to_those_who_end_later() -> None:
    """P=7, B=1. "a" ends with 5 beside 2 of "b", which then grows to 4."""
    for admission, names in (("max_tokens", ["a"]), ("expected_peak", ["a", "b"])):
        run = Run(7, 1, 8, prefix_caching=False, admission=admission)
        run.add("a", [1, 2, 3], max_tokens=3)
        run.step()
        run.add("b", [5], max_tokens=4)
        assert let_in(run) == names
        assert run.scheduler.stats.num_preemptions == 0


requests = st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 2))


@settings(max_examples=60, deadline=None)
@given(
    wanted=st.lists(st.lists(requests, max_size=3), min_size=1, max_size=12),
    num_blocks=st.integers(12, 40),
    block_size=st.sampled_from([1, 2, 4]),
    admission=st.sampled_from(["max_tokens", "expected_peak"]),
    caching=st.booleans(),
)
def test_nobody_is_preempted_where_the_most_that_may_come_is_kept_free(
    wanted: list[list[tuple[int, int, int]]],
    num_blocks: int,
    block_size: int,
    admission: str,
    caching: bool,
) -> None:
    """Lengths unknown: the expected ones are the caps. Prompts are computed in one step."""
    run = Run(num_blocks, block_size, 500, 16, prefix_caching=caching, admission=admission)
    for arrivals in wanted:
        for length, tokens, n in arrivals:
            prompt = [(length + i) % 50 for i in range(length)]
            room = num_blocks * block_size // n - length
            run.add(
                str(run.sent), prompt, n=n, temperature=1.0, max_tokens=max(1, min(tokens, room))
            )
        run.step()
    run.finish()
    if not (caching and admission == "expected_peak"):  # hits are counted as if they stayed
        assert run.scheduler.stats.num_preemptions == 0


# ---- the forecast


def test_blocks_that_several_hold_are_counted_with_the_last_to_end() -> None:
    """B=4. "long" and "short" share 2 blocks.

    At the end of "short" they have 11 + 12 tokens, 3 + 3 - 2 blocks; "long" alone in the end 20.
    """
    run = Run(20, 4, 64)
    run.add("first", range(8), max_tokens=1)
    run.finish()
    run.add("long", range(8), max_tokens=13)
    run.add("short", [*range(8), 30], max_tokens=4)
    run.step()
    scheduler = run.scheduler
    forecast = Forecast(run.manager, scheduler.config, scheduler._roster.lengths)
    growths = forecast.of_running(scheduler._roster.running)
    assert sorted(g.remaining for g in growths) == [2, 11]
    assert peak_blocks(growths, 4) == 5
    assert sum(g.offset for g in growths) == -2
    run.finish()


# ---- watermark


@pytest.mark.parametrize(("watermark", "count"), [(0.0, 3), (0.2, 3), (0.21, 2), (1.0, 1)])
def test_the_watermark_stays_free_beside_those_who_run(watermark: float, count: int) -> None:
    """P=10, B=4: prompts of 2, 4 and 2 blocks leave 2, a fifth of the pool."""
    run = Run(10, 4, 64, prefix_caching=False, watermark=watermark)
    for i, blocks in enumerate((2, 4, 2)):
        run.add(str(i), [i + 1] * 4 * blocks, max_tokens=2)
    assert len(let_in(run)) == count


# ---- a bounded queue


def waiting_behind_one(**bounds: int) -> Run:
    run = Run(64, 4, 8, max_num_seqs=1, errors_ok=True, **bounds)
    run.add("runs", [1], max_tokens=9)
    run.step()
    for name, length in (("first", 3), ("second", 2), ("third", 1)):
        run.add(name, [2] * length, max_tokens=1)
    run.step()
    return run


def test_a_full_queue_refuses_and_says_how_full_it_is() -> None:
    run = waiting_behind_one(max_num_waiting=2)
    assert "2 requests wait and max_num_waiting=2" in run.ends["third", 0].error
    with pytest.raises(OverloadError, match="2 requests wait"):
        run.scheduler.validate(Add("x", (1,), SamplingParams(), 0.0, 0))
    run.finish()
    assert run.reason("first") == run.reason("second") == "length"
    run.scheduler.validate(Add("x", (1,), SamplingParams(), 0.0, 0))


def test_a_queue_of_too_many_tokens_refuses_and_says_how_many() -> None:
    run = waiting_behind_one(max_waiting_tokens=4)
    error = run.ends["second", 0].error
    assert "1 requests of 3 prompt tokens wait, with the 2 of this one" in error
    assert "max_waiting_tokens=4" in error
    assert ("third", 0) not in run.ends  # 3 + 1 are no more than 4
    run.abort("first")
    run.add("fourth", [2] * 3, max_tokens=1)
    run.finish()
    assert run.reason("third") == run.reason("fourth") == "length"


def test_an_empty_queue_takes_a_request_of_any_size() -> None:
    run = Run(64, 4, 8, max_waiting_tokens=4)
    run.add("large", [2] * 50, max_tokens=1)
    run.finish()
    assert run.reason("large") == "length"


def test_a_preempted_request_gets_back_into_a_full_queue() -> None:
    run = waiting_behind_one(max_num_waiting=2)
    assert run.preempt("runs")
    assert run.scheduler.stats.num_waiting == 3
    run.finish()
    assert run.reason("runs") == "length" and len(run.tokens["runs", 0]) == 9


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("admission", "all"),
        ("admission", None),
        ("admission_quantile", 1.5),
        ("admission_quantile", float("nan")),
        ("watermark", -0.1),
        ("watermark", "1"),
        ("watermark", True),
        ("max_num_waiting", 0),
        ("max_waiting_tokens", 1.5),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        SchedulerConfig(4, 8, 64, **{name: value})
