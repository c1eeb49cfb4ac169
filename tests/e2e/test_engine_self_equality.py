"""Bit-identical logits whatever the batch, its order, chunking, block size, hits and preemption.

Every draw of a run is recorded as raw float32 logits under (seed + sample index, position) and
compared with the solo run of the same request.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_draws import recording_draws
from tiny_models import VOCAB, save_tiny

from pagedkv import LLM, SamplingParams

Logits = dict[tuple[int, int], bytes]
Run = Callable[..., Logits]
PROMPTS = [
    [(7 * i * i + 3 * i + j * 11) % VOCAB for i in range(n)]
    for j, n in enumerate([1, 2, 3, 5, 9, 16, 17, 31, 33, 48])
]
# The same system prompt, then different ends: hits that are full, partial and absent.
SHARED = [
    [5, 9, 2, 44, 8, 13, 21, 34, 55, 3, 58, 1, 59, 60, 11, 17, 19, 23, 29, 31, *p[:7]]
    for p in PROMPTS
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of which the parity tests show that attention decides its logits."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny("llama", folder)
    return folder


@pytest.fixture
def run(model: Path) -> Run:
    """Runs prompts (seed 100 i for prompt i) and returns the logits of every draw."""

    def go(
        prompts: list[list[int]],
        order: list[int] | None = None,
        n: int = 1,
        max_tokens: int = 6,
        seeds: list[int] | None = None,
        before_step: Callable[[LLM, int], None] | None = None,
        warm: list[list[int]] | None = None,
        **settings: object,
    ) -> Logits:
        settings = {"num_blocks": 200, "max_num_batched_tokens": 64, **settings}
        llm = LLM(model, deterministic=True, attention_backend="native", **settings)
        engine = llm.engine
        seeds = seeds or [100 * i for i in range(len(prompts))]
        if warm:
            llm.generate([{"prompt_token_ids": p} for p in warm], SamplingParams(max_tokens=3))
        with recording_draws() as draws:
            for i in order if order is not None else range(len(prompts)):
                params = SamplingParams(
                    n=n, temperature=0.8, seed=seeds[i], max_tokens=max_tokens, ignore_eos=True
                )
                engine.add_request(f"r{i}", {"prompt_token_ids": prompts[i]}, params)
            steps = 0
            while engine.has_unfinished_requests():
                if before_step is not None:
                    before_step(llm, steps)
                engine.step()
                steps += 1
        seen: Logits = {}
        for draw in draws:
            bits = draw.logits.numpy().tobytes()
            assert seen.setdefault((draw.key, draw.position), bits) == bits
        return seen

    return go


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


def solo(run: Run, prompts: list[list[int]], dtype: str, **settings: object) -> Logits:
    """Each request alone in a fresh engine."""
    alone: Logits = {}
    for i, _ in enumerate(prompts):
        alone |= run(prompts, order=[i], dtype=dtype, **settings)
    return alone


def assert_same(got: Logits, want: Logits) -> None:
    assert got.keys() == want.keys()
    differing = [key for key in want if got[key] != want[key]]
    assert not differing, f"{len(differing)} of {len(want)} draws differ, first {differing[0]}"


def test_logits_depend_on_the_tokens(run: Run) -> None:
    """The comparison can fail: another prompt gives other logits everywhere."""
    ours, other = run([PROMPTS[5]]), run([[*PROMPTS[5][:-1], 0]])
    assert all(ours[key] != other[key] for key in ours)


def test_any_batch_and_any_position_in_it(run: Run, dtype: str) -> None:
    alone = solo(run, PROMPTS, dtype)
    for order in ([*range(10)], [*range(9, -1, -1)], [3, 9, 0, 5, 1, 8, 2, 7, 4, 6]):
        assert_same(run(PROMPTS, order=order, dtype=dtype), alone)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_any_block_size_and_chunking(run: Run, dtype: str, block_size: int) -> None:
    want = run(PROMPTS, dtype=dtype)
    for budget in (5, 7, 33, 300):
        got = run(PROMPTS, dtype=dtype, block_size=block_size, max_num_batched_tokens=budget)
        assert_same(got, want)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_prefix_hits_full_partial_and_absent(run: Run, dtype: str, block_size: int) -> None:
    want = run(SHARED, dtype=dtype, enable_prefix_caching=False)
    for warm in (SHARED, [SHARED[0]], [SHARED[3][:10]]):
        assert_same(run(SHARED, dtype=dtype, warm=warm, block_size=block_size), want)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_prefixes_longer_than_a_span_read_once_for_all_rows(
    run: Run, dtype: str, block_size: int
) -> None:
    """Rows with common blocks share their reads of K/V; alone there is nothing to share."""
    stem = [(11 * i * i + 5 * i) % VOCAB for i in range(140)]
    prompts = [[*stem, i, *range(1, i)] for i in range(1, 7)]
    alone = solo(run, prompts, dtype)
    settings = {"dtype": dtype, "block_size": block_size, "num_blocks": 1200}
    shared: list[int] = []

    def look(llm: LLM, step: int) -> None:
        shared.append(llm.engine.core.executor._backend.shared_spans)

    assert_same(run(prompts, warm=[[*stem, 0]], before_step=look, **settings), alone)
    assert shared[-1] > 0


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_four_samples_of_one_prompt(run: Run, dtype: str, block_size: int) -> None:
    """Sample i of seed s is sample 0 of seed s + i, alone."""
    prompts = [PROMPTS[5], PROMPTS[6], PROMPTS[7]]
    together = run(prompts, n=4, dtype=dtype, block_size=block_size)
    assert_same(together, run(prompts, n=4, dtype=dtype, order=[2, 0, 1], block_size=16))
    for i in range(4):
        alone = run(prompts, order=[1], dtype=dtype, seeds=[0, 100 + i, 0])
        assert alone.items() <= together.items()


@pytest.mark.parametrize("n", [1, 4])
def test_forced_preemption_at_every_step_of_a_short_run(run: Run, dtype: str, n: int) -> None:
    prompts = [PROMPTS[4], PROMPTS[6], SHARED[1]]
    want = run(prompts, n=n, max_tokens=4, dtype=dtype)

    def preempt_at(step: int) -> Callable[[LLM, int], None]:
        def preempt(llm: LLM, now: int) -> None:
            scheduler = llm.engine.core.scheduler
            for request in list(scheduler._roster.running) if now == step else []:
                scheduler._roster.preempt(request)

        return preempt

    for step in range(1, 8):
        got = run(
            prompts,
            n=n,
            max_tokens=4,
            dtype=dtype,
            block_size=3,
            max_num_batched_tokens=11,
            before_step=preempt_at(step),
        )
        assert_same(got, want)


def test_a_pool_so_small_that_everyone_is_preempted(run: Run, dtype: str) -> None:
    want = run(PROMPTS, dtype=dtype)
    assert_same(run(PROMPTS, dtype=dtype, block_size=3, num_blocks=19), want)


def test_any_number_of_threads(run: Run, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("PAGEDKV_NUM_THREADS", "1")
        one = run(PROMPTS, dtype=dtype)
        monkeypatch.setenv("PAGEDKV_NUM_THREADS", "2")
        assert_same(run(PROMPTS, dtype=dtype), one)
    finally:
        torch.set_num_threads(before)
