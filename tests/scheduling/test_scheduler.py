"""What a step consists of, and when samples end."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from harness import VOCAB, Run, solo

from pagedkv.cache import BlockManager
from pagedkv.engine.toy import ToyExecutor
from pagedkv.errors import ConfigError, PagedKVError, RequestError
from pagedkv.scheduling.batch import Row, make_batch
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Abort, Add
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.scheduler import Scheduler
from pagedkv.scheduling.step import Result


def query_lens(run: Run) -> list[list[int]]:
    return [step.query_lens.tolist() for step in run.steps]


def test_decodes_come_first_then_prefills_share_the_budget():
    run = Run(budget=8)
    run.add("a", [1, 2, 3], max_tokens=8)
    run.step()
    run.add("b", range(1, 21), max_tokens=1)
    for _ in range(3):
        run.step()
    run.finish()
    assert query_lens(run)[:4] == [[3], [1, 7], [1, 7], [1, 6]]


def test_a_prefill_leaves_half_of_the_budget_while_another_request_waits_for_its_first_token():
    run = Run(budget=9)
    run.add("a", range(1, 21), max_tokens=1)
    run.add("b", range(21, 27), max_tokens=1)
    run.finish()
    assert query_lens(run) == [[5, 4], [7, 2], [8]]  # what "b" leaves of its half is used


def test_a_prefill_has_the_whole_budget_while_nobody_who_waits_can_use_it():
    run = Run(budget=9, max_num_seqs=1)
    run.add("a", range(1, 21), max_tokens=1)
    run.add("b", range(21, 27), max_tokens=1)  # no seat
    run.finish()
    assert query_lens(run) == [[9], [9], [2], [6]]


def test_a_prefill_is_not_widened_beyond_the_pool():
    """What it has left, 8 tokens, no longer fits beside what the other has grown to."""
    run = Run(num_blocks=18, block_size=1, budget=9)
    run.add("old", [1], max_tokens=9)
    run.step()
    run.add("a", range(2, 18), max_tokens=1)
    run.add("b", range(22, 32), max_tokens=1)  # no blocks
    run.step()
    run.step()
    assert query_lens(run) == [[1], [1, 8], [1, 4]]
    assert run.scheduler.stats.num_preemptions == 0
    run.finish()


def test_admission_is_in_order_of_arrival_and_stops_at_the_first_that_does_not_fit():
    run = Run(num_blocks=4, block_size=4, budget=32)
    run.add("a", range(1, 8), max_tokens=3)
    run.add("b", range(11, 24), max_tokens=1)
    run.add("c", [30], max_tokens=1)
    run.step()
    assert run.request("a").branches and not run.request("b").branches
    assert not run.request("c").branches
    run.finish()
    ends = list(run.ends)
    assert ends == [("a", 0), ("b", 0), ("c", 0)]


def test_requests_join_and_leave_between_steps():
    run = Run()
    run.add("a", [1, 2], max_tokens=6)
    run.step()
    run.add("b", [3, 4], max_tokens=2)
    run.finish()
    assert [len(lens) for lens in query_lens(run)] == [1, 2, 2, 1, 1, 1]


def test_one_reserve_a_plan(monkeypatch):
    run = Run(num_blocks=6, block_size=2)
    calls = []
    reserve = BlockManager.reserve
    monkeypatch.setattr(
        BlockManager, "reserve", lambda self, *a: (calls.append(0), reserve(self, *a))[1]
    )
    for name in "abc":
        run.add(name, [1, 2, 3], seed=ord(name), temperature=1.0, max_tokens=6)
    run.finish()
    assert run.scheduler.stats.num_preemptions > 0
    assert len(calls) == len(run.steps)


def test_refused_admission_leaves_the_cache_untouched():
    run = Run(num_blocks=4, block_size=4)
    run.add("a", range(1, 9), max_tokens=1)
    run.finish()
    run.add("b", range(21, 29), max_tokens=3)
    run.step()
    run.add("c", [*range(1, 9), *range(31, 36)], max_tokens=1)
    run.core.step(0.0)
    before = run.manager.state_key()
    request = run.request("c")
    assert not request.branches
    for _ in range(50):
        run.scheduler._planner._admit([], [], 8, 0.0)
    assert not request.branches
    assert run.manager.state_key() == before
    run.finish()


@pytest.mark.parametrize(
    ("params", "reason", "count"),
    [
        ({"max_tokens": 3}, "length", 3),
        ({"max_tokens": None}, "length", 15),
        ({"max_tokens": 30}, "length", 15),
    ],
)
def test_length_endings(params, reason, count):
    run = Run(max_model_len=20)
    run.add("a", range(1, 6), **params)
    run.finish()
    assert run.reason("a") == reason
    assert len(run.tokens["a", 0]) == count
    assert run.ends["a", 0].error is None


def toy_with_eos(**kwargs) -> Run:
    toy = ToyExecutor(64, 4, VOCAB, eos_token_id=49, eos_positions=(5, 6, 9))
    return Run(executor=toy, eos=(49,), **kwargs)


def test_the_end_token_ends_a_sample():
    run = toy_with_eos()
    run.add("a", [1, 2, 3], max_tokens=20)
    run.finish()
    assert len(run.tokens["a", 0]) == 3
    assert run.tokens["a", 0][-1] == 49
    end = run.ends["a", 0]
    assert (end.finish_reason, end.stop_reason) == ("stop", None)


def test_ignore_eos_goes_on():
    run = toy_with_eos()
    run.add("a", [1, 2, 3], max_tokens=20, ignore_eos=True)
    run.finish()
    assert run.reason("a") == "length"
    assert run.tokens["a", 0].count(49) >= 3


def test_min_tokens_forbids_what_would_end_the_sample():
    run = toy_with_eos()
    natural = solo([1, 2, 3], max_tokens=1)[0]
    run.add("a", [1, 2, 3], max_tokens=20, min_tokens=4, stop_token_ids=[natural])
    run.finish()
    forbidden = [step.samples[0].forbidden for step in run.steps]
    assert forbidden[:4] == [(49, natural)] * 4
    assert not any(forbidden[4:])
    assert [step.samples[0].best for step in run.steps] == [not ids for ids in forbidden]
    assert not {49, natural} & set(run.tokens["a", 0][:4])
    assert len(run.tokens["a", 0]) > 4


def test_a_stop_token_is_reported():
    run = Run()
    third = solo([1, 2, 3], max_tokens=3)[2]
    assert third not in solo([1, 2, 3], max_tokens=2)
    run.add("a", [1, 2, 3], max_tokens=20, stop_token_ids=[third])
    run.finish()
    end = run.ends["a", 0]
    assert (end.finish_reason, end.stop_reason) == ("stop", third)
    assert len(run.tokens["a", 0]) == 3


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "empty"),
        (range(1, 21), {}, "max_model_len=20"),
        (range(1, 14), {}, "takes 4 blocks of 4"),
        ([1], {"n": 5}, "n=5"),
        ([1, VOCAB], {}, f"token id {VOCAB} at position 1"),
        ([1, -1], {}, "token id -1"),
        ([1, 2**40], {}, f"token id {2**40}"),
        ([1, 2**70], {}, "int token ids"),
        ([1, 0.5], {}, "int token ids"),
        ([1], {"stop_token_ids": [VOCAB]}, f"stop_token_ids has token id {VOCAB}"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, f"logit_bias has token id {VOCAB}"),
        (([1], [2, 3]), {}, "int token ids"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_numbers(prompt, params, words):
    run = Run(num_blocks=3, max_num_seqs=4, max_model_len=20, errors_ok=True)
    before = run.manager.snapshot()
    add = Add("a", tuple(prompt), SamplingParams(**params), 0.0, 0)
    with pytest.raises(RequestError, match=words):
        run.scheduler.validate(add)
    deltas = run.scheduler.add(add, 0.0)
    assert [d.sample for d in deltas] == list(range(add.params.n))
    assert all(d.finish_reason == "error" and words in d.error for d in deltas)
    assert run.manager.snapshot() == before
    assert len(run.scheduler) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"tenant": "\ud800"},
        {"tenant": 5},
        {"arrival": "x"},
        {"arrival": math.nan},
        {"arrival": math.inf},
        {"arrival": 10**400},
        {"arrival": None},
        {"arrival": True},
        {"priority": "high"},
        {"priority": 1.5},
        {"seed": None},
    ],
    ids=str,
)
def test_dead_engine_a_bad_field_ends_its_own_request_only(fields):
    """It would raise where requests are compared, hashed or encoded, in every later step."""
    run = Run(errors_ok=True)
    run.add("before", [1, 2, 3], max_tokens=4)
    good = Add("bad", (1, 2, 3), SamplingParams(), 0.0, 0)
    run.core.send(replace(good, **fields))
    run.add("after", [1, 2, 3], max_tokens=4)
    run.finish()
    assert run.reason("bad") == "error" and next(iter(fields)) in run.ends["bad", 0].error
    assert run.tokens["before", 0] == run.tokens["after", 0] == solo([1, 2, 3], max_tokens=4)


def test_dead_engine_a_request_that_cannot_be_read_ends_alone():
    run = Run(errors_ok=True)
    run.core.send(Add("bad", (1, 2, 3), None, 0.0, 0))
    run.add("good", [1, 2, 3], max_tokens=4)
    run.finish()
    assert "cannot be read" in run.ends["bad", 0].error
    assert run.tokens["good", 0] == solo([1, 2, 3], max_tokens=4)


@pytest.mark.parametrize(
    "message", [None, "abort", Abort(5), Add([], (1,), SamplingParams(), 0, 0)]
)
def test_dead_engine_what_is_no_message_is_refused_at_once(message):
    run = Run()
    with pytest.raises(RequestError):
        run.core.send(message)
    assert not run.core.has_unfinished()


def test_draining_finishes_what_is_there_and_refuses_the_rest():
    run = Run(errors_ok=True)
    run.add("a", [1, 2], max_tokens=3)
    run.step()
    run.scheduler.drain()
    run.add("b", [1, 2], max_tokens=3)
    run.finish()
    assert run.reason("a") == "length"
    assert run.reason("b") == "error"


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="max_num_seqs=0"):
        SchedulerConfig(0, 8, 8)
    with pytest.raises(ConfigError, match="max_seqs=4"):
        Scheduler(BlockManager(4, 4, max_seqs=4), SchedulerConfig(5, 8, 8))


def test_misuse_is_refused():
    run = Run()
    with pytest.raises(PagedKVError, match="no step is in flight"):
        run.scheduler.fail("x", 0.0)
    run.scheduler.add(Add("a", (1, 2), SamplingParams(max_tokens=1), 0.0, 0), 0.0)
    with pytest.raises(RequestError, match="in use"):
        run.scheduler.add(Add("a", (1,), SamplingParams(), 0.0, 0), 0.0)
    step = run.scheduler.plan(0.0)
    with pytest.raises(PagedKVError, match="step 0 is in flight"):
        run.scheduler.plan(0.0)
    run.record(run.scheduler.commit(run.recorder.collect(run.recorder.submit(step)), 0.0))
    run.check_idle()


def test_penalties_get_prompt_and_output():
    run = Run()
    run.add("a", [1, 2], max_tokens=3, presence_penalty=0.5)
    run.add("b", [1, 2], max_tokens=1)
    run.finish()
    last = run.steps[-1].samples[0]
    assert last.prompt.tolist() == [1, 2]
    assert last.output.tolist() == run.tokens["a", 0][:2]
    assert run.steps[0].samples[1].prompt is None


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 3, 20])
def test_prompt_scores_cover_the_prompt_once_whatever_was_cached(chunk, caching):
    """vllm#3251, #3914, #5344, #8268, PR#42245: scores of skipped positions were made up."""
    reference = None
    run = Run(num_blocks=16, block_size=4, budget=chunk, prefix_caching=caching)
    for name, preempt_at in (("cold", None), ("warm", None), ("again", 1), ("later", 3)):
        run.add(name, range(1, 10), max_tokens=2, prompt_logprobs=2)
        run.add(f"{name}'s mate", [40], max_tokens=1)  # so that chunks differ after a preemption
        for i in range(100):
            if i == preempt_at:
                run.preempt(name)
            if not run.core.has_unfinished():
                break
            run.step()
        mine = [s for d in run.deltas if d.request_id == name for s in d.prompt_logprobs]
        assert [int(s.ids[0]) for s in mine] == list(range(2, 10))
        values = np.array([s.values for s in mine])
        reference = values if reference is None else reference
        assert np.array_equal(values, reference)
        assert run.cached(name) == 0


def test_logprobs_follow_the_tokens():
    run = Run()
    run.add("a", [1, 2], max_tokens=4, logprobs=3)
    run.finish()
    for delta in run.deltas:
        assert len(delta.logprobs) == len(delta.token_ids)
        for token, scored in zip(delta.token_ids, delta.logprobs, strict=True):
            assert scored.ids[0] == token and len(scored.ids) == 4 and scored.rank == 1


class Lying(ToyExecutor):
    """Changes one Result on the way."""

    def __init__(self, at: int, change) -> None:
        super().__init__(64, 4, VOCAB)
        self.at, self.change = at, change

    def collect(self, ticket) -> Result:
        result = super().collect(ticket)
        return self.change(result) if ticket == self.at else result


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def changed(result: Result, **fields) -> Result:
    return replace(result, **fields)


def test_foreign_error_a_bad_row_ends_its_own_sample_only():
    run = Run(executor=Lying(2, lambda r: changed(r, errors={0: "bad row"})), errors_ok=True)
    run.add("a", [1, 2], n=2, temperature=1.0, max_tokens=5)
    run.add("b", [3, 4], max_tokens=5)
    run.finish()
    assert run.ends["a", 0].error == "bad row" and len(run.tokens["a", 0]) == 2
    assert run.reason("a", 1) == "length"
    assert run.tokens["a", 1] == solo([1, 2], seed=1, temperature=1.0, max_tokens=5)
    assert run.tokens["b", 0] == solo([3, 4], max_tokens=5)


def test_foreign_error_a_bad_prompt_row_ends_all_samples_on_it():
    run = Run(executor=Lying(0, lambda r: changed(r, errors={0: "bad row"})), errors_ok=True)
    run.add("a", [1, 2], n=2, temperature=1.0, max_tokens=5)
    run.add("b", [3, 4], max_tokens=5)
    run.finish()
    assert [run.ends["a", i].error for i in (0, 1)] == ["bad row"] * 2
    assert run.tokens["b", 0] == solo([3, 4], max_tokens=5)


@pytest.mark.parametrize("max_tokens", [2, 5])
def test_a_complete_sample_ends_with_its_last_token(max_tokens):
    run = Run(executor=Lying(1, lambda r: changed(r, complete=(0,))))
    run.add("a", [1, 2], max_tokens=max_tokens, min_tokens=2, ignore_eos=True)
    run.add("b", [3, 4], max_tokens=5)
    run.finish()
    assert (run.reason("a"), run.ends["a", 0].complete) == ("stop", True)
    assert run.tokens["a", 0] == solo([1, 2], max_tokens=2)
    assert (run.reason("b"), run.ends["b", 0].complete) == ("length", False)


def test_a_row_without_its_token_is_an_error_of_the_row():
    empty = np.zeros(0, np.int32)
    lying = Lying(1, lambda r: changed(r, tokens=empty, indptr=ints(0, 0), logprobs=()))
    run = Run(executor=lying, errors_ok=True)
    run.add("a", [1, 2], max_tokens=5)
    run.finish()
    assert "no token" in run.ends["a", 0].error


@pytest.mark.parametrize(
    "fields",
    [
        {"indptr": np.zeros(1, np.int32)},
        {"indptr": ints(0, 3)},
        {"indptr": ints(1, 1)},
        {"indptr": ints(2, 1)},
        {"indptr": np.array([0.0, 1.0])},
        {"indptr": [0, 1]},
        {"tokens": ints(VOCAB)},
        {"tokens": ints(-1)},
        {"tokens": np.array([1.5])},
        {"tokens": [1]},
        {"tokens": None},
        {"logprobs": ()},
        {"logprobs": (None,)},
        {"logprobs": (None, None)},
        {"parents": ints(1)},
        {"parents": ints()},
        {"prompt_logprobs": ((),)},
        {"errors": {7: "x"}},
        {"complete": (1,)},
        {"complete": (-1,)},
        {"complete": None},
    ],
    ids=str,
)
def test_misfit_result_fails_the_step_and_the_engine_goes_on(fields):
    run = Run(executor=Lying(1, lambda r: changed(r, **fields)), errors_ok=True)
    run.add("a", [1, 2], max_tokens=5, logprobs=1)
    run.step()
    run.step()
    assert run.reason("a") == "error"
    assert "the executor" in run.ends["a", 0].error
    run.add("b", [3, 4], max_tokens=5)
    run.finish()
    assert run.tokens["b", 0] == solo([3, 4], max_tokens=5)


def test_a_result_of_several_tokens_a_sample_is_taken_up_to_its_end():
    """Known tokens that are not computed yet are simply computed next: no phases."""
    known = solo([1, 2], max_tokens=6)
    lying = Lying(
        0,
        lambda r: changed(r, tokens=ints(*known[:4]), indptr=ints(0, 4), logprobs=()),
    )
    run = Run(executor=lying)
    run.add("a", [1, 2], max_tokens=6)
    run.finish()
    assert run.tokens["a", 0] == known
    assert query_lens(run) == [[2], [4], [1]]


def test_several_tokens_of_a_decode_are_computed_next():
    known = solo([1, 2], max_tokens=6)
    lying = Lying(
        1,
        lambda r: changed(r, tokens=ints(*known[1:4]), indptr=ints(0, 3), logprobs=()),
    )
    run = Run(executor=lying)
    run.add("a", [1, 2], max_tokens=6)
    run.finish()
    assert run.tokens["a", 0] == known
    assert query_lens(run) == [[2], [1], [3], [1]]


def test_a_row_that_is_wrongly_taken_to_decode_is_loud():
    run = Run()
    run.add("a", [1, 2, 3], max_tokens=3)
    run.step()
    manager, scheduler = run.core.scheduler.manager, run.core.scheduler
    (branch,) = scheduler.roster.requests["a"].branches
    assert branch.decodes
    rows, seqs = [Row(branch, 2, 2)], np.array([branch.seq])
    reservation = manager.reserve(seqs, np.array([2]))
    with pytest.raises(PagedKVError, match="rows of 2 tokens gave 1"):
        make_batch(manager, 1, rows, seqs, reservation, manager.stamp(), ())
    manager.close(branch.seq)


def test_row_error_wins_over_a_short_score_list():
    lying = Lying(0, lambda r: changed(r, prompt_logprobs=((),), errors={0: "bad row"}))
    run = Run(executor=lying, errors_ok=True)
    run.add("a", [1, 2, 3], prompt_logprobs=0)
    run.finish()
    assert run.ends["a", 0].error == "bad row"


def test_tables_are_sent_when_they_change_only():
    run = Run(budget=4, block_size=1)
    run.add("pair", [9], n=2, temperature=1.0)
    run.add("first", range(1, 20))
    run.add("second", range(21, 40))
    for _ in range(4):
        run.step()
    row = int(run.manager.rows([run.request("second").branches[0].seq])[0])
    assert [row in step.table_rows for step in run.steps] == [True, False, False, False]
    assert [row in step.changed_rows for step in run.steps] == [True, False, False, False]
    run.finish()
