"""Faults that were reported against paged serving systems, each with its smallest input.

The docstrings name the upstream reports. P: blocks of the pool, B: block size, [n]: n tokens.
"""

from __future__ import annotations

import random

import pytest
from harness import VOCAB, Run, solo

from pagedkv.cache import BlockManager
from pagedkv.engine.core import EngineCore
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Abort, Add
from pagedkv.scheduling.params import BeamSearchParams, SamplingParams
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.simulation.clock import VirtualClock
from pagedkv.simulation.executor import LinearCost, TimedExecutor


def tokens(first: int, n: int) -> list[int]:
    return list(range(first, first + n))


def running(run: Run, name: str) -> bool:
    request = run.request(name)
    return request is not None and bool(request.branches)


# Leaks on abort and on failed paths


def test_leak_abort_of_a_request_that_never_had_blocks():
    """vllm PR#18485: the clean-up asked the manager for block ids it did not have."""
    run = Run(num_blocks=4, block_size=4, max_num_seqs=1)
    run.add("r1", tokens(1, 3), max_tokens=4)
    run.add("r2", tokens(5, 3), max_tokens=4)
    run.step()
    run.abort("r2")
    run.finish()
    assert run.reason("r2") == "abort"
    assert run.tokens["r1", 0] == solo(tokens(1, 3), max_tokens=4)
    assert run.manager.num_free_blocks + run.manager.num_cached_blocks == 4


@pytest.mark.parametrize("block_size", [1, 2, 4, 16], ids="pages of {}".format)
def test_leak_books_balance_after_200_random_requests_at_every_page_size(block_size):
    """sglang#11970, #6888, #7130, #20010, sglang-jax#70: free + cached + in use != total."""
    rng = random.Random(block_size)
    run = Run(num_blocks=16, block_size=block_size, budget=16, max_model_len=48)
    for i in range(200):
        length = rng.randint(1, min(40, 16 * block_size))
        prompt = (tokens(1, 40)[: rng.randint(0, length)] + [rng.randint(1, 49)] * length)[:length]
        run.add(str(i), prompt, max_tokens=rng.randint(1, 4))
        run.step()
        if rng.random() < 0.2:
            run.abort(str(rng.randint(0, i)))
    run.finish()


def request_that_waits_for_a_cached_prefix() -> Run:
    """P=4, B=4: A=[8] cached in two blocks, R0 holds the other two, R1=A+[8] needs all four."""
    run = Run(num_blocks=4, block_size=4, budget=16)
    run.add("a", tokens(1, 8), max_tokens=1)
    run.finish()
    run.add("r0", tokens(21, 5), max_tokens=3)
    run.step()
    run.add("r1", tokens(1, 8) + tokens(31, 8), max_tokens=1)
    run.step()
    return run


def test_leak_prefix_hits_of_a_request_that_does_not_fit_are_not_held():
    """Avarok/atlas PR#373 (b): hits were held, the roll-back missed them."""
    run = request_that_waits_for_a_cached_prefix()
    assert running(run, "r0") and not running(run, "r1")
    counts = [run.manager.refcount(block) for block in range(1, 5)]
    for _ in range(50):
        run.scheduler._planner._admit([], [], 8, 0.0)
    assert not running(run, "r1")
    assert [run.manager.refcount(block) for block in range(1, 5)] == counts
    assert (run.manager.num_held_blocks, run.manager.num_cached_blocks) == (2, 2)
    assert len(run.manager.evict(2)) == 2
    run.finish()


def test_leak_a_request_that_waited_with_hits_starts_afresh():
    """neuralmagic/vllm PR#92, vllm PR#18411: hits kept from the failed try were taken twice."""
    run = request_that_waits_for_a_cached_prefix()
    while run.request("r1") is not None:
        run.step()
    table = run.steps[-1].changed_tables[-1].tolist()
    assert len(table) == len(set(table)) == 4 and 0 not in table
    run.finish()
    assert run.cached("r1") == 8
    assert run.tokens["r1", 0] == solo(tokens(1, 8) + tokens(31, 8), max_tokens=1)


def test_leak_chunks_go_on_where_the_last_one_ended_without_a_cache():
    """sglang#36855, PR#33996: with caching off every chunk restarted at 0."""
    run = Run(num_blocks=8, block_size=4, budget=4, prefix_caching=False)
    run.add("r1", tokens(1, 16), max_tokens=1)
    held = []
    while run.core.has_unfinished():
        run.step()
        held.append(run.manager.num_held_blocks)
    assert [s.query_lens.tolist() for s in run.steps] == [[4]] * 4
    assert [s.positions[0] for s in run.steps] == [0, 4, 8, 12]
    assert held == [1, 2, 3, 0]


def test_leak_a_request_that_ends_in_its_first_step_gives_its_seat_back():
    """sglang PR#10871: finishing in the prefill step skipped the release of the request slot."""
    run = Run(num_blocks=16, block_size=4, max_num_seqs=4)
    run.add("long", tokens(1, 3), max_tokens=40)
    for i in range(100):
        run.add(str(i), [1 + i % 40, 2], max_tokens=1)
    run.finish()
    assert all(run.reason(str(i)) == "length" for i in range(100))
    assert run.manager.num_open_sequences == 0
    assert max(s.num_running for s in run.stats) <= 4


def test_leak_abort_of_unknown_and_ended_ids():
    """tenstorrent/vllm#145, vllm#2475: KeyError took the engine down."""
    run = Run()
    run.abort("never-existed")
    run.step()
    run.add("a", [1, 2], max_tokens=2)
    run.abort("a", sample=7)
    run.finish()
    for _ in range(2):
        run.abort("a")
    run.abort("a", sample=0)
    run.step()
    run.add("b", [1, 2], max_tokens=9)
    run.step()
    run.abort("b")
    run.abort("b")
    run.finish()
    assert (run.reason("a"), run.reason("b")) == ("length", "abort")


# Admission arithmetic


def test_admission_charges_hits_that_nobody_holds():
    """ROCm/ATOM PR#902: cached hits leave the free count when they are claimed."""
    run = Run(num_blocks=4, block_size=4, budget=32)
    run.add("a", tokens(1, 8), max_tokens=1)
    run.finish()
    before = run.manager.snapshot()
    with_hits = Add("r1", tuple(tokens(1, 8) + tokens(21, 12)), SamplingParams(), 9.0, 0)
    assert run.manager.match(with_hits.prompt).demand == 5
    run.errors_ok = True
    run.record(run.scheduler.add(with_hits, 0.0))
    assert run.reason("r1") == "error"
    assert run.manager.snapshot() == before
    run.add("r2", tokens(1, 8) + tokens(31, 8), max_tokens=1)
    run.step()
    assert run.reason("r2") == "length"
    assert run.cached("r2") == 8
    run.finish()


def test_admission_looks_up_before_it_allocates():
    """vllm#42948: scratch blocks were allocated first and evicted what would have been found."""
    run = Run(num_blocks=4, block_size=4, budget=32)
    for name in ("first", "again"):
        run.add(name, tokens(1, 16), max_tokens=1)
        run.finish()
    assert (run.cached("first"), run.cached("again")) == (0, 15)
    assert run.tokens["first", 0] == run.tokens["again", 0]


# Foreign K/V


def test_foreign_text_between_concurrent_long_requests():
    """sglang#4593: text of one document in the answer to another."""
    prompts = {chr(65 + i): [i + 1] * (10 + i) for i in range(6)}
    for seed in range(12):
        rng = random.Random(seed)
        run = Run(num_blocks=32, block_size=4, budget=rng.randint(3, 20))
        for name in rng.sample(sorted(prompts), 6):
            run.add(name, prompts[name], max_tokens=6)
            for _ in range(rng.randint(0, 3)):
                run.step()
        run.finish()
        for name, prompt in prompts.items():
            assert run.tokens[name, 0] == solo(prompt, max_tokens=6)


def test_foreign_text_when_a_large_request_changes_the_order_of_allocation():
    """vllm#38606, #39146: fuzzers found short requests that diverge; also retry after cancel."""
    for seed in range(10):
        rng = random.Random(seed)
        run = Run(num_blocks=12, block_size=2, budget=6)
        prompts = {f"short{i}": [i + 1, 2, 3] for i in range(5)}
        run.add("large", tokens(1, 18), max_tokens=3)
        for name, prompt in prompts.items():
            run.add(name, prompt, max_tokens=4)
            run.step()
            if rng.random() < 0.5:
                run.abort(name)
                run.step()
                if run.reason(name) == "abort":
                    del run.ends[name, 0], run.tokens[name, 0]
                    run.add(name, prompt, max_tokens=4)
            if rng.random() < 0.3:
                run.abort("large")
        run.finish()
        for name, prompt in prompts.items():
            assert run.tokens[name, 0] == solo(prompt, max_tokens=4)


def test_foreign_count_last_token_is_not_run_on_top_of_itself():
    """lablup/mlxcel#1760, Rapid-MLX PR#1124: a full hit counted the last prompt token twice."""
    run = Run(block_size=4)
    for name in ("first", "again"):
        run.add(name, tokens(1, 8), max_tokens=3, logprobs=5)
        run.finish()
    first = [step for step in run.steps if step.samples and step.samples[0].position == 8]
    assert [step.context_lens.tolist() for step in first] == [[8], [8]]
    values = [
        [lp.values.tolist() for d in run.deltas if d.request_id == name for lp in d.logprobs]
        for name in ("first", "again")
    ]
    assert values[0] == values[1] and len(values[0]) == 3


def test_foreign_tenant_is_never_hit():
    """vllm#16016, llm-d-router#1389, vllm PR#53347: no isolation between tenants."""
    run = Run()
    for name, tenant in (("t1", "x"), ("t2", "y"), ("t1 again", "x"), ("none", None)):
        run.add(name, tokens(1, 9), max_tokens=1, tenant=tenant)
        run.finish()
    assert [run.cached(name) for name in ("t1", "t2", "t1 again", "none")] == [0, 0, 8, 0]


# Block boundaries and lengths


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 16])
def test_boundary_at_least_one_token_is_computed_after_a_full_hit(length):
    """nano-vllm#144(2), PR#199, vllm PR#11186/#17999, mlx-lm PR#1581, mattn/tensai PR#221."""
    run = Run(num_blocks=8, block_size=4, budget=32)
    for name in "abc":
        run.add(name, tokens(1, length), max_tokens=2)
        run.finish()
    assert [run.cached(name) for name in "abc"] == [0, length - 1, length - 1]
    assert all((step.query_lens >= 1).all() for step in run.steps)
    assert run.tokens["a", 0] == run.tokens["b", 0] == run.tokens["c", 0]


def test_boundary_suffix_shorter_than_a_chunk_is_one_step():
    """mlxcel PR#183: an empty chunk was booked after a short suffix."""
    run = Run(block_size=4, budget=8)
    run.add("a", tokens(1, 20), max_tokens=1)
    run.finish()
    before = len(run.steps)
    run.add("b", tokens(1, 20) + tokens(31, 3), max_tokens=1)
    run.finish()
    assert [step.query_lens.tolist() for step in run.steps[before:]] == [[3]]


def test_boundary_prompt_as_long_as_max_model_len():
    """vllm PR#23683, #13067: an assertion in the runner instead of an answer."""
    run = Run(block_size=4, max_model_len=16, budget=32, errors_ok=True)
    for n in (15, 16, 17):
        run.add(str(n), tokens(1, n), max_tokens=5)
    run.finish()
    assert (run.reason("15"), len(run.tokens["15", 0])) == ("length", 1)
    assert (run.reason("16"), run.reason("17")) == ("error", "error")
    run.add("next", [1, 2], max_tokens=2)
    run.finish()
    assert run.reason("next") == "length"


# Groups of samples


def test_group_state_of_an_ended_request_does_not_meet_a_new_one_of_its_id():
    """openvino.genai PR#615: the sampler's state was kept, the next use of the id failed."""
    run = Run()
    for n, seed in ((3, 0), (2, 5)):
        run.ends.clear()
        run.tokens.clear()
        run.add("same", [1, 2, 3], seed, temperature=1.0, max_tokens=4, n=n)
        run.finish()
        for i in range(n):
            expected = solo([1, 2, 3], seed + i, temperature=1.0, max_tokens=4)
            assert run.tokens["same", i] == expected


def test_group_cold_prompt_has_no_cached_tokens():
    """sglang#5525: the samples' shared prompt was counted as hits."""
    run = Run()
    run.add("a", tokens(1, 9), temperature=1.0, max_tokens=3, n=3)
    run.finish()
    assert {d.num_cached_tokens for d in run.deltas} == {0}
    assert sum(len(run.tokens["a", i]) for i in range(3)) == 9
    assert sum(step.num_tokens for step in run.steps) == 9 + 3 * 2


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("width", [2, 3])
def test_group_beams_are_those_of_a_search_that_recomputes_everything(width, block_size):
    """transformers#46612, #29730: beams changed parents, some caches kept the old order."""
    prompt, steps = tokens(7, 5), 8
    beams = [(0.0, ())]
    switches = 0
    for _ in range(steps):
        grown = []
        for rank, (total, text) in enumerate(beams):
            scores = next_logprobs((*prompt, *text))
            grown += [(total + float(scores[t]), (*text, t), rank) for t in range(VOCAB)]
        grown = sorted(grown, key=lambda beam: -beam[0])[:width]
        switches += [rank for _, _, rank in grown] != list(range(len(grown)))
        beams = [(total, text) for total, text, _ in grown]
    assert switches > 2
    run = Run(block_size=block_size, max_num_seqs=width)
    beam = BeamSearchParams(width, steps, length_penalty=0.0, ignore_eos=True)
    run.core.send(Add("a", tuple(prompt), beam.sampling, 0.0, 0, beam=beam))
    run.finish()
    for i, (total, text) in enumerate(beams):
        assert run.tokens["a", i] == list(text)
        assert run.ends["a", i].score == pytest.approx(total, abs=1e-4)


def next_logprobs(text: tuple[int, ...]) -> dict[int, float]:
    """Of the toy model after a text, in an engine that has seen nothing else."""
    run = Run(block_size=16, budget=64, prefix_caching=False)
    run.add("a", text, max_tokens=1, logprobs=VOCAB)
    run.finish()
    (scored,) = run.deltas[0].logprobs
    return dict(zip(scored.ids.tolist(), scored.values.tolist(), strict=True))


def test_group_state_of_beams_does_not_meet_samples_of_the_same_id():
    """openvino.genai PR#615: beams first, then samples under the id of the beams."""
    run = Run()
    beam = BeamSearchParams(3, 4)
    for _ in range(2):
        run.ends.clear()
        run.tokens.clear()
        run.core.send(Add("same", (1, 2, 3), beam.sampling, 0.0, 0, beam=beam))
        run.finish()
        best = [run.tokens["same", i] for i in range(3)]
        run.ends.clear()
        run.tokens.clear()
        run.add("same", [1, 2, 3], 5, temperature=1.0, max_tokens=4, n=2)
        run.finish()
        for i in range(2):
            expected = solo([1, 2, 3], 5 + i, temperature=1.0, max_tokens=4)
            assert run.tokens["same", i] == expected
    assert len({tuple(text) for text in best}) == 3


# Deadlock, livelock, starvation


def test_livelock_admission_by_the_first_chunk_only():
    """vllm PR#37307, PR#28018, #41951: admitted, half prefilled, preempted, again and again."""
    run = Run(num_blocks=10, block_size=4, budget=6)
    for name in ("r1", "r2"):
        run.add(name, tokens(ord(name[1]) - 48, 12), max_tokens=5)
    for _ in range(5):
        run.step()
    run.add("r3", tokens(20, 24), max_tokens=2)
    while run.core.has_unfinished():
        held_by_others = run.manager.num_held_blocks
        before = running(run, "r3")
        run.step()
        if running(run, "r3") and not before:
            assert held_by_others <= 4
    run.check_idle()
    assert run.scheduler.stats.num_preemptions == 0
    computed = sum(step.num_tokens for step in run.steps)
    assert computed == 2 * (12 + 4) + 24 + 1


def test_livelock_everyone_needs_one_more_block():
    """inference-sim#297, #529: each preemption lost all progress, for ever."""
    run = Run(num_blocks=6, block_size=1, max_num_seqs=6)
    for i in range(6):
        run.add(str(i), [i + 1], max_tokens=5)
    run.finish(limit=40)
    for i in range(6):
        assert run.tokens[str(i), 0] == solo([i + 1], max_tokens=5)
    assert run.scheduler.stats.num_preemptions <= 12


def test_deadlock_last_running_request_outgrows_the_pool():
    """sglang PR#14948, #15626, #19881: nothing was left to preempt, an assertion failed."""
    run = Run(num_blocks=3, block_size=2)
    run.add("r1", [1, 2], max_tokens=10)
    run.add("next", [3, 4], max_tokens=3)
    run.finish()
    end = run.ends["r1", 0]
    assert (end.finish_reason, len(run.tokens["r1", 0])) == ("length", 5)
    assert "cut short at 7 tokens" in end.error
    assert run.tokens["next", 0] == solo([3, 4], max_tokens=3)


def test_deadlock_last_running_group_outgrows_the_pool():
    """The rule for samples: the highest index ends first, the others go on with its blocks."""
    run = Run(num_blocks=6, block_size=2)
    run.add("r1", [1, 2, 3], 1, temperature=1.0, max_tokens=8, n=3)
    run.finish()
    lengths = [len(run.tokens["r1", i]) for i in range(3)]
    assert [run.reason("r1", i) for i in range(3)] == ["length"] * 3
    assert [run.ends["r1", i].error is None for i in range(3)] == [True, False, False]
    assert 8 == lengths[0] > lengths[1] > lengths[2]
    assert run.tokens["r1", 0] == solo([1, 2, 3], 1, temperature=1.0, max_tokens=8)


def test_starvation_of_a_short_prompt_behind_a_long_chunked_one():
    """vllm#10774, #57413: one prefill took the whole budget of every step."""
    run = Run(budget=8)
    run.add("r1", tokens(1, 45) + [1] * 35, max_tokens=1)
    run.step()
    run.add("r2", [3, 4, 5], max_tokens=1)
    for _ in range(2):
        run.step()
    assert run.reason("r2") == "length"
    assert [step.query_lens.tolist() for step in run.steps] == [[8], [5, 3], [8]]
    run.finish()


def test_starvation_a_preempted_request_keeps_its_place():
    """vllm#11361, #24365, PR#20608, PR#56843: fresh requests were admitted before it."""
    run = Run(num_blocks=6, block_size=2, max_num_seqs=2)
    run.add("r1", [1, 2, 3], max_tokens=6)
    run.add("r2", [4, 5, 6], max_tokens=6)
    run.step()
    for i in range(4):
        run.add(f"fresh{i}", [10 + i], max_tokens=2)
    run.step()
    assert run.preempt("r2")
    run.step()
    assert running(run, "r2")
    run.finish()
    assert list(run.ends)[:2] == [("r1", 0), ("r2", 0)]


def test_deadlock_more_samples_than_sequences():
    """vllm#6646: a group that can never be scheduled waited for ever."""
    run = Run(max_num_seqs=4, errors_ok=True)
    run.add("a", [1, 2], n=8)
    run.add("b", [1, 2], n=4, max_tokens=2)
    run.finish()
    assert all("n=8" in run.ends["a", i].error for i in range(8))
    assert all(run.reason("b", i) == "length" for i in range(4))


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_starvation_every_running_decode_gets_its_token_in_every_step(budget):
    """A step whose budget was smaller than the batch left the last decodes standing."""
    run = Run(budget=budget)
    for i in range(5):
        run.add(str(i), [i + 1, 2], max_tokens=6)
    run.add("refused", [1], n=budget + 1)
    run.errors_ok = True
    started: set[str] = set()
    while run.core.has_unfinished():
        deltas = run.step()
        running = started - {name for name, _ in run.ends}
        assert running <= {d.request_id for d in deltas}
        started |= {d.request_id for d in deltas if d.token_ids}
        assert len(run.steps[-1].seqs) <= budget
    assert f"the {budget} sequences that run at once" in run.ends["refused", 0].error
    for i in range(5):
        assert run.tokens[str(i), 0] == solo([i + 1, 2], max_tokens=6)


def test_starvation_no_room_for_a_batch_shrinks_nothing():
    """llama.cpp#14097, #4185, #6603, #23652: an error for all, and less room after each round."""
    run = Run(num_blocks=5, block_size=4, max_num_seqs=4, prefix_caching=False)
    steps = []
    for round_ in range(30):
        before = len(run.steps)
        for i in range(4):
            run.add(f"{round_}.{i}", [i + 1, 2, 3], max_tokens=6)
        run.finish()
        steps.append(len(run.steps) - before)
        assert all(len(run.tokens[f"{round_}.{i}", 0]) == 6 for i in range(4))
    assert len(set(steps)) == 1


def test_starvation_of_running_decodes_by_a_long_prompt():
    """vllm#11067, sglang PR#14050, pegainfer PR#368: one token for every whole prefill chunk."""
    clock = VirtualClock()
    manager = BlockManager(200, 4, max_seqs=8)
    scheduler = Scheduler(manager, SchedulerConfig(8, 32, 500))
    core = EngineCore(scheduler, TimedExecutor(clock, LinearCost(1.0, 1 / 8)))
    params = SamplingParams(temperature=0.0, max_tokens=60)
    for name in "abc":
        core.send(Add(name, (1, 2, ord(name)), params, 0.0, 0))
    core.step(clock.now)
    core.send(Add("long", tuple(range(400)), SamplingParams(max_tokens=1), 1.0, 0))
    last = dict.fromkeys("abc", clock.now)
    gaps, chunks = [], []
    while core.has_unfinished():
        deltas, stats = core.step(clock.now)
        chunks.append(stats.num_tokens)
        for delta in deltas:
            if delta.request_id in last:
                gaps.append(clock.now - last[delta.request_id])
                last[delta.request_id] = clock.now
    assert max(gaps) <= 1.0 + 32 / 8
    assert chunks[:13] == [32] * 13  # the long prompt moves on in every step, too


# Preempt and resume


def test_resume_computes_all_uncomputed_tokens():
    """nano-vllm#144(1): "no output yet" decided the phase, a resumed prefill ran as a decode."""
    run = Run(block_size=4, budget=64, prefix_caching=False)
    run.add("a", tokens(1, 6), max_tokens=6)
    for _ in range(3):
        run.step()
    run.preempt("a")
    run.step()
    step = run.steps[-1]
    assert (step.query_lens.tolist(), step.context_lens.tolist()) == ([9], [9])
    assert step.tokens.tolist() == tokens(1, 6) + run.tokens["a", 0][:3]
    run.finish()
    assert run.tokens["a", 0] == solo(tokens(1, 6), max_tokens=6)


@pytest.mark.parametrize("caching", [False, True])
def test_resume_group_is_preempted_and_resumed_as_one(caching):
    """vllm PR#5349: partly preempted groups broke their shared blocks."""
    for at in range(1, 7):
        run = Run(block_size=4, budget=7, prefix_caching=caching)
        run.add("a", tokens(1, 6), 3, temperature=1.0, max_tokens=7, n=3)
        for _ in range(at):
            run.step()
        assert run.preempt("a")
        assert run.manager.num_held_blocks == 0 and run.request("a").branches == []
        run.finish()
        for i in range(3):
            expected = solo(tokens(1, 6), 3 + i, temperature=1.0, max_tokens=7)
            assert run.tokens["a", i] == expected


def test_resume_hits_do_not_count_as_cached_tokens():
    """vllm PR#25787: preempted tokens found again in the own cache were counted as prefix hits."""
    run = Run(block_size=2, budget=64)
    run.add("a", tokens(1, 6), max_tokens=6)
    for _ in range(3):
        run.step()
    run.preempt("a")
    run.finish()
    assert run.steps[3].query_lens.tolist() == [1]  # it did hit
    assert {d.num_cached_tokens for d in run.deltas} == {0}


def test_resume_group_waits_until_all_its_samples_fit():
    """vllm PR#5349, PR#37307: a group let in by its prompt alone is preempted again at once."""
    run = Run(num_blocks=4, block_size=16, budget=64)
    run.add("other", [1], max_tokens=14)
    run.add("a", tokens(1, 16), temperature=1.0, max_tokens=4, n=3)
    run.finish()
    assert run.scheduler.stats.num_preemptions == 1
    assert next(iter(run.ends)) == ("other", 0)


def test_resume_group_keeps_the_room_for_its_samples():
    """vllm PR#37307: who came later was let into blocks that the resumed samples still need."""
    run = Run(num_blocks=5, block_size=16, budget=8, prefix_caching=False)
    run.add("a", tokens(1, 16), temperature=1.0, max_tokens=4, n=3)
    for _ in range(3):
        run.step()
    assert run.preempt("a")
    run.add("later", tokens(20, 17), max_tokens=1)
    while run.request("a") is not None:
        run.step()
        assert run.request("a") is None or not running(run, "later")
    run.finish()
    assert run.scheduler.stats.num_preemptions == 1


# Aborts while a step is in flight


@pytest.mark.parametrize("sample", [None, 0, 1])
def test_in_flight_abort_of_a_sample_whose_tail_is_being_copied(sample):
    """The copy's source and destination are released once; the other sample reads its own tail."""
    run = Run(num_blocks=8, block_size=4)
    run.add("pair", tokens(1, 6), seed=3, n=2, temperature=1.0, max_tokens=4)
    run.step()
    step = run.scheduler.plan(0.0)
    assert len(step.copies) == 1
    run.recorder.note_requests(step)  # what is taken in flight counts
    # Handed out by the next step.
    run.core._deltas += run.scheduler.abort(Abort("pair", sample))
    run.core._deltas += run.scheduler.commit(run.toy.collect(run.toy.submit(step)), 0.0)
    run.check()
    run.finish()
    for i in range(2):
        alone = solo(tokens(1, 6), 3 + i, temperature=1.0, max_tokens=4)
        aborted = sample in (None, i)
        assert run.reason("pair", i) == ("abort" if aborted else "length")
        assert run.tokens["pair", i] == (alone[:1] if aborted else alone)
