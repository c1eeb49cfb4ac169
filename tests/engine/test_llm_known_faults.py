"""Faults reported against other engines, at the level of LLM and LLMEngine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tiny_llm import VOCAB, run, save_tiny_llm, toy_engine

from pagedkv import LLM, RequestOutput, SamplingParams
from pagedkv.engine.toy import ToyExecutor
from pagedkv.errors import RequestError

PROMPTS = [[(7 * i * i + 3 * i + 11 * j) % 250 for i in range(3 + 2 * j)] for j in range(16)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llm")
    save_tiny_llm(path)
    return path


def make(folder: Path, **kwargs: Any) -> LLM:
    settings = {"num_blocks": 256, "block_size": 4, "deterministic": True}
    return LLM(folder, **{**settings, **kwargs})


def generate(llm: LLM, prompts: list[list[int]], **params: Any) -> list[RequestOutput]:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 6, **params})
    return llm.generate([{"prompt_token_ids": p} for p in prompts], sampling)


def exact(output: RequestOutput) -> list[tuple[int, tuple[tuple[int, float], ...]]]:
    """Tokens and log-probabilities of the first sample, for comparison to the bit."""
    sample = output.outputs[0]
    assert sample.logprobs is not None
    scores = [tuple((t, e.logprob) for t, e in entry.items()) for entry in sample.logprobs]
    return list(zip(sample.token_ids, scores, strict=True))


def test_foreign_text_padding_of_a_tiny_pool_does_not_reach_it(folder: Path) -> None:
    """transformers PR#46765: padding read and wrote one trash slot of a tiny pool."""
    prompts = PROMPTS[:3]  # 3, 5 and 7 tokens
    solo = [exact(generate(make(folder), [p], max_tokens=4, logprobs=3)[0]) for p in prompts]
    for blocks in (4, 5, 8, 16):
        together = generate(make(folder, num_blocks=blocks), prompts, max_tokens=4, logprobs=3)
        assert [exact(output) for output in together] == solo


@pytest.mark.parametrize("others", [1, 3, 7, 15])
@pytest.mark.parametrize("budget", [5, 512])
def test_foreign_text_batch_mates_change_nothing(folder: Path, others: int, budget: int) -> None:
    """vllm#5898, #6735, #23138, #51187, #47069: greedy text changed with the batch."""
    probe = [9, 8, 7, 6, 5, 4, 3, 2, 1]
    want = exact(generate(make(folder), [probe], logprobs=2)[0])
    llm = make(folder, max_num_batched_tokens=budget)
    for position in {0, others // 2, others}:  # cold the first time, prefix hits after that
        batch = [*PROMPTS[:position], probe, *PROMPTS[position:others]]
        assert exact(generate(llm, batch, logprobs=2)[position]) == want


def test_stale_scores_prompt_logprobs_with_hits_are_those_of_a_cold_run(folder: Path) -> None:
    """vllm#3251, #3914, #5344, #8268, PR#42245: a crash, shifted or stale values."""
    prompt = [11, 22, 33, 44, 55, 66, 77, 88, 99]
    cold = generate(make(folder), [prompt], prompt_logprobs=2, max_tokens=1)[0].prompt_logprobs
    assert cold is not None and len(cold) == len(prompt) and cold[0] is None
    for entries, token in zip(cold[1:], prompt[1:], strict=True):
        assert entries is not None and math.isfinite(entries[token].logprob)
    llm = make(folder)
    generate(llm, [[*prompt, 1, 2, 3, 4]])
    for _ in range(2):
        assert generate(llm, [prompt], prompt_logprobs=2, max_tokens=1)[0].prompt_logprobs == cold


@pytest.mark.parametrize("empty", ["", [], {"prompt": ""}, {"prompt_token_ids": []}])
def test_dead_engine_an_empty_prompt_is_refused_and_the_next_request_runs(empty: Any) -> None:
    """vllm#7283, #7632, #1130, PR#7746: an empty prompt ended the engine for everyone."""
    engine = toy_engine()
    with pytest.raises(RequestError):
        engine.add_request("bad", empty, SamplingParams())
    engine.add_request("good", "hello", SamplingParams(max_tokens=3))
    assert len(run(engine)["good"].outputs[0].token_ids) == 3


def test_dead_engine_an_empty_conversation_is_refused(folder: Path) -> None:
    """vllm#7283, #7632, #1130, PR#7746: messages []."""
    with pytest.raises(RequestError, match="empty"):
        make(folder).chat([])


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"top_p": 0},
        {"top_p": 2},
        {"top_k": -5},
        {"logprobs": 10**6},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"n": 0},
        {"stop": [""]},
        {"stop_token_ids": [VOCAB]},
        {"logit_bias": {VOCAB: 1.0}},
        {"logit_bias": {1: math.nan}},
    ],
    ids=str,
)
def test_dead_engine_a_bad_parameter_never_reaches_the_loop(bad: dict[str, Any]) -> None:
    """vllm#5822, #10432: one bad parameter raised inside the loop and stopped it."""
    good = SamplingParams(temperature=0, max_tokens=8)
    alone = toy_engine()
    alone.add_request("a", "prompt", good)
    want = run(alone)["a"].outputs[0].token_ids
    engine = toy_engine()
    engine.add_request("a", "prompt", good)
    engine.step()
    with pytest.raises(RequestError):
        engine.add_request("bad", "prompt", SamplingParams(**bad))
    assert run(engine)["a"].outputs[0].token_ids == want


@pytest.mark.parametrize(
    "big",
    [
        {"n": 10**9},
        {"stop": ["x"] * 500_000},
        {"stop_token_ids": list(range(10_000))},
        {"logit_bias": dict.fromkeys(range(10_000), 1.0)},
    ],
    ids=lambda big: next(iter(big)),
)
def test_unbounded_work_lists_of_a_request_are_bounded(big: dict[str, Any]) -> None:
    """vllm PR#37952, #51447: one small body cost seconds on the event loop."""
    with pytest.raises(RequestError, match=next(iter(big))):
        SamplingParams(**big)


def test_mixed_up_ids_a_second_live_request_is_refused_and_the_first_goes_on() -> None:
    """vllm#10583, #15041, PR#27987: two live requests of one id corrupted each other."""
    greedy = SamplingParams(temperature=0, max_tokens=8)
    engine = toy_engine()
    engine.add_request("x", "first", greedy)
    for steps in range(3):
        with pytest.raises(RequestError, match="in use"):
            engine.add_request("x", "second", greedy)
        assert len(engine.step()) == 1, steps
    assert len(run(engine)["x"].outputs[0].token_ids) == 8


def test_mixed_up_ids_an_id_is_free_once_its_abort_was_reported() -> None:
    """vllm#10583, #15041, PR#27987: the same id right after an abort."""
    greedy = SamplingParams(temperature=0, max_tokens=8)
    engine = toy_engine()
    engine.add_request("x", "first", greedy)
    engine.step()
    engine.abort_request("x")
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("x", "second", greedy)
    (last,) = engine.step()
    assert last.finished and last.outputs[0].finish_reason == "abort"
    engine.add_request("x", "second", greedy)
    again = run(engine)["x"]
    assert again.prompt == "second" and len(again.outputs[0].token_ids) == 8


def test_wrong_usage_counts_with_samples_stops_aborts_and_hits() -> None:
    """vllm#8625, TGI#2531, sglang#5525: usage was wrong with n > 1, stops and last chunks."""
    engine = toy_engine()
    engine.add_request("plain", "a prompt", SamplingParams(temperature=0, max_tokens=9))
    text = run(engine)["plain"].outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=9, n=3, stop=[text[3]])
    engine.add_request("group", "a prompt", params)
    engine.add_request("aborted", "other", SamplingParams(temperature=0, max_tokens=9))
    last: dict[str, RequestOutput] = {}
    counts: list[int] = []
    for step in range(100):
        if step == 3:
            engine.abort_request("aborted")
        for output in engine.step():
            last[output.request_id] = output
            if output.request_id == "aborted":
                counts.append(len(output.outputs[0].token_ids))
        if not engine.has_unfinished_requests():
            break
    group = last["group"]
    assert group.num_cached_tokens == len(group.prompt_token_ids) - 1
    for sample in group.outputs:
        assert sample.finish_reason == "stop" and sample.text == text[: text.index(text[3])]
        assert len(sample.token_ids) == text.index(text[3]) + 1  # the stop string's token counts
    assert counts == sorted(counts) and last["aborted"].outputs[0].finish_reason == "abort"
    assert len(last["aborted"].outputs[0].token_ids) == counts[-1] < 9


def test_ignored_setting_the_pool_is_as_large_as_the_memory_given(folder: Path) -> None:
    """vllm.cpp#357: the limit was ignored and 27 GB reserved.

    One block less than fits: the null block.
    """
    limit = 4 * 2**20
    llm = make(folder, num_blocks=None, kv_cache_memory=limit)
    block_bytes = llm.report.block_bytes
    assert llm.engine.block_manager.num_blocks == limit // block_bytes - 1


@pytest.mark.parametrize("hits", [0, 4, 8])
def test_foreign_text_a_prefill_that_resumes_from_hits_equals_a_cold_one(
    folder: Path, hits: int
) -> None:
    """tenstorrent/vllm#415: resuming from cached K/V gave other text than a cold prefill."""
    prompt = [11, 22, 33, 44, 55, 66, 77, 88, 99, 110]
    want = exact(generate(make(folder), [prompt], logprobs=64)[0])
    llm = make(folder)
    generate(llm, [[*prompt[:hits], 200, 201]])
    output = generate(llm, [prompt], logprobs=64)[0]
    assert output.num_cached_tokens == hits
    assert exact(output) == want


def test_leak_one_of_three_streams_goes_away_after_three_tokens() -> None:
    """openvino model_server#4428: a client went away and the block manager failed later."""
    greedy = SamplingParams(temperature=0, max_tokens=8)
    solo = {}
    for name in ("one", "two", "six"):
        alone = toy_engine(num_blocks=8)
        alone.add_request(name, name, greedy)
        solo[name] = run(alone)[name].outputs[0]
    engine = toy_engine(num_blocks=8)
    for name in solo:
        engine.add_request(name, name, greedy)
    seen: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id] = output
            if output.request_id == "two" and len(output.outputs[0].token_ids) == 3:
                engine.abort_request("two")
    assert seen["two"].outputs[0].finish_reason == "abort"
    assert seen["two"].outputs[0].token_ids == solo["two"].token_ids[:3]
    assert seen["one"].outputs[0] == solo["one"] and seen["six"].outputs[0] == solo["six"]
    manager = engine.block_manager
    manager.check()
    assert manager.num_free_blocks + manager.num_cached_blocks == 8


@pytest.mark.parametrize("reset", [True, False])
def test_stale_cache_of_old_weights_is_not_hit_after_a_reset(reset: bool) -> None:
    """vllm#9744, lmdeploy#4917, vllm-omni#6739, NeMo-RL PR#4018: old and new K/V were mixed.

    Without the reset the toy's attention meets an entry of the old weights.
    """
    greedy = SamplingParams(temperature=0, max_tokens=4)
    executor = ToyExecutor(64, 4, vocab_size=VOCAB)
    engine = toy_engine(executor=executor)
    engine.add_request("old", "same prompt", greedy)
    run(engine)
    executor._root = ToyExecutor(64, 4, vocab_size=VOCAB, weights=1)._root
    if reset:
        engine.reset_prefix_cache()
    engine.add_request("new", "same prompt", greedy)
    output = run(engine)["new"]
    if reset:
        fresh = toy_engine(executor=ToyExecutor(64, 4, vocab_size=VOCAB, weights=1))
        fresh.add_request("new", "same prompt", greedy)
        assert output.num_cached_tokens == 0
        assert output.outputs[0] == run(fresh)["new"].outputs[0]
    else:
        assert "another prefix" in (output.outputs[0].error or "")


def test_stale_cache_a_reset_while_requests_run_is_for_new_requests_only() -> None:
    """vllm#9744, lmdeploy#4917, vllm-omni#6739, NeMo-RL PR#4018: refused, yet reported done."""
    greedy = SamplingParams(temperature=0, max_tokens=8)
    alone = toy_engine()
    alone.add_request("a", "same prompt", greedy)
    want = run(alone)["a"].outputs[0]
    engine = toy_engine()
    engine.add_request("running", "same prompt", greedy)
    for _ in range(3):
        engine.step()
    engine.reset_prefix_cache()
    engine.add_request("new", "same prompt", greedy)
    last = run(engine)
    assert last["new"].num_cached_tokens == 0
    assert last["running"].outputs[0] == last["new"].outputs[0] == want
