"""LLMEngine over the toy model: ids, aborts, seeds, stop strings, refusals."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
from tiny_llm import EOS, VOCAB, run, toy_engine

from pagedkv.cache import InvariantError
from pagedkv.engine.toy import ToyExecutor
from pagedkv.errors import RequestError
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.step import Result, Ticket

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def solo(prompt: object, params: SamplingParams = GREEDY) -> tuple[int, ...]:
    engine = toy_engine()
    engine.add_request("solo", prompt, params)
    return run(engine)["solo"].outputs[0].token_ids


@pytest.mark.parametrize(
    "prompt",
    ["hello", {"prompt": "hello"}, {"prompt_token_ids": (71, 68, 75, 75, 78)}],
    ids=["text", "dict", "ids"],
)
def test_every_form_of_a_prompt_is_the_same_request(prompt: object) -> None:
    engine = toy_engine()
    engine.add_request("a", prompt, GREEDY)
    output = run(engine)["a"]
    assert output.prompt_token_ids == (71, 68, 75, 75, 78)
    assert output.prompt == (
        None if isinstance(prompt, dict) and "prompt" not in prompt else "hello"
    )
    assert output.outputs[0].token_ids == solo("hello")
    assert output.finished and output.outputs[0].finish_reason == "length"


def test_numpy_ids_are_ids() -> None:
    assert solo({"prompt_token_ids": np.array([5, 6])}) == solo({"prompt_token_ids": [5, 6]})


def test_outputs_grow_and_metrics_are_in_order() -> None:
    engine = toy_engine()
    engine.add_request("a", "hello", GREEDY, arrival_time=0.5)
    seen = []
    while engine.has_unfinished_requests():
        seen += engine.step()
    lengths = [len(output.outputs[0].token_ids) for output in seen]
    assert lengths == [1, 2, 3, 4, 5, 6]
    metrics = seen[-1].metrics
    assert metrics.arrival_time == 0.5
    assert metrics.first_token_time is not None and metrics.finished_time is not None
    assert 0.5 < metrics.first_token_time < metrics.finished_time
    assert metrics.ttft == metrics.first_token_time - 0.5
    assert metrics.queue_time == 0.5  # the clock's first look was that of the first step
    assert seen[0].metrics.finished_time is None


def test_queue_time_is_that_of_the_first_admission() -> None:
    engine = toy_engine(num_blocks=4)
    engine.add_request("first", "x" * 12, SamplingParams(temperature=0, max_tokens=3))
    engine.add_request("second", "y" * 12, SamplingParams(temperature=0, max_tokens=3))
    last = run(engine)
    first, second = last["first"].metrics, last["second"].metrics
    assert first.queue_time is not None and second.queue_time is not None
    assert second.admitted_time is not None and first.finished_time is not None
    assert second.admitted_time > first.finished_time
    assert second.queue_time > first.queue_time


def test_live_id_is_refused_and_free_again_when_the_last_output_was_returned() -> None:
    engine = toy_engine()
    engine.add_request("x", "abc", GREEDY)
    with pytest.raises(RequestError, match="'x' is in use"):
        engine.add_request("x", "other", GREEDY)
    assert run(engine)["x"].outputs[0].token_ids == solo("abc")
    engine.add_request("x", "other", GREEDY)
    assert run(engine)["x"].outputs[0].token_ids == solo("other")


def test_id_of_a_request_that_a_stop_string_ended_is_free_at_once() -> None:
    engine = toy_engine()
    engine.add_request("keep", "abc", SamplingParams(temperature=0, max_tokens=20))
    text = _text("abc", 3)
    engine.add_request("x", "abc", dataclasses.replace(GREEDY, stop=text[1]))
    while not any(o.request_id == "x" and o.finished for o in engine.step()):
        pass
    engine.add_request("x", "other", GREEDY)  # the loop has not even heard of the stop
    last = run(engine)
    assert last["x"].outputs[0].token_ids == solo("other")
    assert last["keep"].outputs[0].token_ids == solo(
        "abc", SamplingParams(temperature=0, max_tokens=20)
    )


def _text(prompt: str, tokens: int) -> str:
    engine = toy_engine()
    engine.add_request("t", prompt, dataclasses.replace(GREEDY, max_tokens=tokens))
    return run(engine)["t"].outputs[0].text


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("times", [1, 2])
def test_abort_in_every_state_is_reported_once_and_leaves_nothing(steps: int, times: int) -> None:
    engine = toy_engine(max_num_batched_tokens=4)
    engine.add_request("a", "a prompt of many tokens", GREEDY)
    engine.add_request("b", "another", GREEDY)
    for _ in range(steps):
        engine.step()
    for _ in range(times):
        engine.abort_request("a")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    ends = [o for o in outputs if o.request_id == "a" and o.finished]
    assert [o.outputs[0].finish_reason for o in ends] == ["abort"]
    last = [o for o in outputs if o.request_id == "b"][-1]
    assert last.outputs[0].token_ids == solo("another")
    engine.abort_request("a")
    engine.abort_request("never there")
    assert not engine.has_unfinished_requests()


def test_abort_from_other_threads_while_stepping() -> None:
    engine = toy_engine()
    names = [f"r{i}" for i in range(40)]
    for name in names:
        engine.add_request(name, name, SamplingParams(temperature=0, max_tokens=30))
    threads = [
        threading.Thread(target=lambda mine=names[i::4]: [engine.abort_request(n) for n in mine])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    last = run(engine)
    for thread in threads:
        thread.join()
    run(engine)
    assert all(output.finished for output in last.values())
    assert engine.block_manager.num_held_blocks == 0


def test_seeds_are_drawn_from_the_engines_seed_and_recorded() -> None:
    free = SamplingParams(max_tokens=8)

    def outcome(seed: int) -> list[tuple[int, tuple[int, ...]]]:
        engine = toy_engine(seed=seed)
        for name in "abc":
            engine.add_request(name, "same", free)
        last = run(engine)
        return [(last[name].seed, last[name].outputs[0].token_ids) for name in "abc"]

    first = outcome(3)
    assert first == outcome(3) and first != outcome(4)
    assert len({seed for seed, _ in first}) == 3
    engine = toy_engine()
    engine.add_request("again", "same", dataclasses.replace(free, seed=first[1][0]))
    again = run(engine)["again"]
    assert (again.seed, again.outputs[0].token_ids) == first[1]


def test_a_refused_request_draws_no_seed() -> None:
    free = SamplingParams(max_tokens=2)
    seeds = []
    for refused in (0, 2):
        engine = toy_engine(seed=1)
        for _ in range(refused):
            with pytest.raises(RequestError):
                engine.add_request("bad", {"prompt_token_ids": [VOCAB]}, free)
        engine.add_request("a", "x", free)
        seeds.append(run(engine)["a"].seed)
    assert seeds[0] == seeds[1]


def test_sample_i_of_seed_s_is_sample_0_of_seed_s_plus_i() -> None:
    engine = toy_engine()
    engine.add_request("group", "prompt", SamplingParams(n=3, seed=10, max_tokens=8))
    for i in range(3):
        engine.add_request(str(i), "prompt", SamplingParams(seed=10 + i, max_tokens=8))
    last = run(engine)
    for i, sample in enumerate(last["group"].outputs):
        assert sample.token_ids == last[str(i)].outputs[0].token_ids
    assert len({s.token_ids for s in last["group"].outputs}) == 3


def test_stop_string_ends_one_sample_and_releases_its_blocks() -> None:
    whole = _text("prompt", 12)
    params = SamplingParams(temperature=0, max_tokens=12, stop=[whole[4:6]])
    engine = toy_engine()
    engine.add_request("a", "prompt", params)
    outputs = []
    while not (outputs and outputs[-1].finished):
        outputs += engine.step()
    sample = outputs[-1].outputs[0]
    assert sample.text == whole[: whole.index(whole[4:6])]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", whole[4:6])
    assert engine.block_manager.num_held_blocks == 0 and not engine.has_unfinished_requests()
    for output in outputs:
        assert sample.text.startswith(output.outputs[0].text)


def test_end_token_and_ignore_eos() -> None:
    def outcome(**kwargs: object) -> tuple[int, str | None, int | str | None]:
        executor = ToyExecutor(64, 4, vocab_size=VOCAB, eos_token_id=EOS, eos_positions=(7,))
        engine = toy_engine(executor=executor)
        engine.add_request("a", "hello", SamplingParams(temperature=0, max_tokens=6, **kwargs))
        sample = run(engine)["a"].outputs[0]
        return len(sample.token_ids), sample.finish_reason, sample.stop_reason

    assert outcome() == (3, "stop", None)
    assert outcome(ignore_eos=True) == (6, "length", None)
    assert outcome(min_tokens=5) == (6, "length", None)
    assert outcome(stop_token_ids=[EOS], ignore_eos=True) == (3, "stop", EOS)


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        ("", GREEDY, "empty"),
        ({"prompt": ""}, GREEDY, "empty"),
        ({"prompt_token_ids": []}, GREEDY, "empty"),
        ({"prompt_token_ids": [1, -1]}, GREEDY, "token id -1 at position 1"),
        ({"prompt_token_ids": [VOCAB]}, GREEDY, f"token id {VOCAB}"),
        ({"prompt_token_ids": ["a"]}, GREEDY, "int token ids"),
        ({"prompt_token_ids": 3}, GREEDY, "list of token ids"),
        ({"prompt_token_ids": [[1], [2]]}, GREEDY, "flat sequence"),
        ({"prompt": 3}, GREEDY, "must be text"),
        ({}, GREEDY, "a prompt is"),
        (None, GREEDY, "a prompt is"),
        ([1, 2], GREEDY, "a prompt is"),
        ("\ud800", GREEDY, "Unicode"),
        ("x" * 64, GREEDY, "max_model_len=64"),
        ("x", None, "SamplingParams"),
        ("x", SamplingParams(stop_token_ids=[VOCAB]), f"token id {VOCAB}"),
        ("x", SamplingParams(logit_bias={VOCAB: 1.0}), f"token id {VOCAB}"),
        ("x", SamplingParams(n=9), "n=9"),
    ],
)
def test_refusals_name_the_value_and_change_nothing(
    prompt: object, params: object, named: str
) -> None:
    engine = toy_engine()
    with pytest.raises(RequestError, match=named):
        engine.add_request("a", prompt, params)
    assert not engine.has_unfinished_requests()
    engine.add_request("a", "fine", GREEDY)
    assert run(engine)["a"].outputs[0].token_ids == solo("fine")


@pytest.mark.parametrize(
    "kwargs",
    [{"priority": "high"}, {"priority": True}, {"tenant": 3}, {"tenant": ""}, {"request_id": ""}],
)
def test_refusals_of_what_comes_with_a_prompt(kwargs: dict[str, object]) -> None:
    engine = toy_engine()
    request_id = kwargs.pop("request_id", "a")
    with pytest.raises(RequestError):
        engine.add_request(request_id, "x", GREEDY, **kwargs)
    assert not engine.has_unfinished_requests()


def test_prompt_that_fills_the_pool_runs_and_a_longer_one_is_refused() -> None:
    engine = toy_engine(num_blocks=3)
    engine.add_request("full", "x" * 12, GREEDY)
    output = run(engine)["full"].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (1, "length")
    assert output.error is not None and "pool larger" in output.error
    with pytest.raises(RequestError, match="pool has 3"):
        engine.add_request("longer", "x" * 13, GREEDY)


def test_without_a_tokenizer_ids_work_and_text_does_not() -> None:
    engine = toy_engine(tokenizer=False)
    engine.add_request("a", {"prompt_token_ids": [5, 6]}, GREEDY)
    output = run(engine)["a"].outputs[0]
    assert output.text == "" and output.token_ids == solo({"prompt_token_ids": [5, 6]})
    with pytest.raises(RequestError, match="no tokenizer"):
        engine.add_request("b", "text", GREEDY)
    with pytest.raises(RequestError, match="stop strings"):
        engine.add_request("c", {"prompt_token_ids": [5]}, SamplingParams(stop="x", max_tokens=2))


class Failing(ToyExecutor):
    """Raises at its second step."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(64, 4, vocab_size=VOCAB)
        self.error = error

    def collect(self, ticket: Ticket) -> Result:
        if ticket == 1:
            raise self.error
        return super().collect(ticket)


def test_lost_output_an_interrupted_step_is_reported_by_the_next() -> None:
    engine = toy_engine(executor=Failing(KeyboardInterrupt()))
    engine.add_request("a", "hello", GREEDY)
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.has_unfinished_requests()
    (output,) = engine.step()
    assert output.finished and output.outputs[0].finish_reason == "error"
    assert "interrupted" in (output.outputs[0].error or "")
    assert not engine.has_unfinished_requests()
    engine.add_request("a", "hello", GREEDY)  # the id is free again
    assert run(engine)["a"].outputs[0].token_ids == solo("hello")


def test_lost_output_a_damaged_pool_raises_and_the_ends_are_reported_after_it() -> None:
    engine = toy_engine(executor=Failing(RuntimeError("x")))
    engine.add_request("a", "hello", GREEDY)
    engine.step()
    pool = engine.block_manager.pool
    pool.num_free -= 1
    with pytest.raises(InvariantError):
        engine.step()
    pool.num_free += 1
    assert engine.has_unfinished_requests()
    assert run(engine)["a"].outputs[0].finish_reason == "error"


def test_dead_engine_tenant_and_arrival_are_checked_before_they_enter() -> None:
    engine = toy_engine()
    for fields in (
        {"tenant": "\ud800"},
        {"arrival_time": "x"},
        {"arrival_time": float("nan")},
        {"priority": 0.5},
    ):
        with pytest.raises(RequestError, match=next(iter(fields)).split("_")[0]):
            engine.add_request("bad", "hello", GREEDY, **fields)
    assert not engine.has_unfinished_requests()
    engine.add_request("a", "hello", GREEDY, tenant="t", arrival_time=3, priority=-7)
    assert run(engine)["a"].outputs[0].token_ids == solo("hello")


def test_cancel_takes_effect_at_once_and_reports_nothing() -> None:
    engine = toy_engine()
    engine.add_request("a", "prompt", GREEDY)
    engine.add_request("b", "other", GREEDY)
    engine.step()
    engine.cancel(["a", "unknown"])
    engine.add_request("a", "again", GREEDY)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    first = next(o for o in outputs if o.request_id == "a")
    assert first.prompt == "again" and [
        len(o.outputs[0].token_ids) for o in outputs if o.request_id == "b"
    ] == [3, 4, 5, 6]  # the step that `cancel` took is part of the next one's output


def test_several_requests_are_aborted_at_once_and_odd_ids_ignored() -> None:
    engine = toy_engine()
    for name in ("a", "b", "c"):
        engine.add_request(name, name, GREEDY)
    engine.step()
    engine.abort_request(["a", "b", "never", 5])
    ends = {name: out.outputs[0].finish_reason for name, out in run(engine).items()}
    assert ends == {"a": "abort", "b": "abort", "c": "length"}


def test_truths_are_no_token_ids() -> None:
    with pytest.raises(RequestError, match="True"):
        toy_engine().add_request("a", {"prompt_token_ids": [1, True]}, GREEDY)


def test_a_request_is_explained_by_the_id_it_was_given():
    engine = toy_engine()
    for _ in range(2):
        engine.add_request("mine", "some text", SamplingParams(max_tokens=2, temperature=0.0))
        run(engine)
    text = engine.explain("mine")
    assert text.count("request mine#") == 2 and "ended: length after 2 tokens" in text
    with pytest.raises(RequestError, match="'yours' is not in the decision log"):
        engine.explain("yours")
