"""Turns of a conversation and prompts that part, on the toy model: exact counts at the engine.

Whoever took over a wrong entry, or too many, would be stopped by the toy's attention.
"""

from __future__ import annotations

import numpy as np
import pytest
from tiny_llm import VOCAB, run, toy_engine

from pagedkv.engine.llm_engine import LLMEngine
from pagedkv.engine.output import RequestOutput
from pagedkv.engine.toy import ToyExecutor
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.step import Step, Ticket

SIZES = [1, 4, 16]
OUTPUT = 6


class Recording(ToyExecutor):
    """Keeps the steps it has run."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, vocab_size=VOCAB)
        self.steps: list[Step] = []

    def submit(self, step: Step) -> Ticket:
        self.steps.append(step)
        return super().submit(step)

    def take(self) -> list[Step]:
        steps, self.steps = self.steps, []
        return steps


def make(block_size: int, num_blocks: int = 400) -> tuple[LLMEngine, Recording]:
    toy = Recording(num_blocks, block_size)
    engine = toy_engine(
        num_blocks, block_size, max_model_len=200, executor=toy, max_num_batched_tokens=128
    )
    return engine, toy


def prompt_of(length: int) -> list[int]:
    return [(7 * i + 3) % VOCAB for i in range(length)]


def add(engine: LLMEngine, name: str, prompt: list[int], max_tokens: int = OUTPUT) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.add_request(name, {"prompt_token_ids": prompt}, params)


def ask(engine: LLMEngine, prompt: list[int], max_tokens: int = OUTPUT) -> RequestOutput:
    add(engine, "r", prompt, max_tokens)
    return run(engine)["r"]


def output_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def copied(steps: list[Step]) -> list[int]:
    """Slots of each copy."""
    return [filled for step in steps for filled in step.copies[:, 2].tolist()]


def computed(steps: list[Step]) -> int:
    return sum(step.num_tokens for step in steps)


def other(token: int) -> int:
    return (token + 1) % VOCAB


@pytest.mark.parametrize("block_size", SIZES)
def test_every_next_turn_takes_over_all_that_was_computed(block_size: int) -> None:
    """Tail included, and in place: nobody else sees it. The last token drawn was not computed."""
    for length in range(1, 2 * block_size + 2):
        engine, toy = make(block_size)
        known, cached = prompt_of(length), 0
        for turn in range(3):
            output = ask(engine, known)
            steps = toy.take()
            assert output.num_cached_tokens == cached
            assert computed(steps) == len(known) - cached + OUTPUT - 1
            assert copied(steps) == []
            known = known + output_of(output)
            cached = len(known) - 1
            known += [other(token) for token in prompt_of(turn + 1)]
        cold = ask(make(block_size)[0], known)
        assert output_of(ask(engine, known)) == output_of(cold)


@pytest.mark.parametrize("block_size", SIZES)
def test_a_prompt_that_parts_copies_the_matching_slots_only(block_size: int) -> None:
    first = prompt_of(block_size + 3)
    engine, _ = make(block_size)
    known = (first + output_of(ask(engine, first)))[:-1]
    for cut in range(len(known)):
        engine, toy = make(block_size)
        ask(engine, first)
        toy.take()
        parted = [*known[:cut], other(known[cut]), 5, 6]
        output = ask(engine, parted)
        steps = toy.take()
        assert output.num_cached_tokens == cut
        assert computed(steps) == 3 + OUTPUT - 1
        assert copied(steps) == ([cut % block_size] if cut % block_size else [])
        assert output_of(output) == output_of(ask(make(block_size)[0], parted))
        # What it parted from is still whole.
        assert ask(engine, [*known, 9]).num_cached_tokens == len(known)


@pytest.mark.parametrize("block_size", SIZES)
def test_a_prompt_that_stops_short_computes_its_last_token(block_size: int) -> None:
    first = prompt_of(2 * block_size + 2)
    for length in range(1, len(first) + 1):
        engine, toy = make(block_size)
        ask(engine, first)
        toy.take()
        output = ask(engine, first[:length], max_tokens=1)
        steps = toy.take()
        assert output.num_cached_tokens == length - 1
        assert computed(steps) == 1
        assert copied(steps) == ([(length - 1) % block_size] if (length - 1) % block_size else [])


@pytest.mark.parametrize("block_size", SIZES)
def test_of_a_request_that_still_runs_only_full_blocks_are_found(block_size: int) -> None:
    """Its tail has no name while it may grow."""
    first = prompt_of(2 * block_size + 2)
    full = len(first) // block_size * block_size
    for cut in range(len(first) + 1):
        engine, toy = make(block_size)
        add(engine, "runs", first)
        engine.step()
        toy.take()
        add(engine, "parts", [*first[:cut], other([*first, 0][cut]), 5], max_tokens=1)
        engine.step()
        (step,) = toy.take()
        last = run(engine)
        found = min(cut, full)
        assert step.num_tokens == 1 + cut + 2 - found
        assert copied([step]) == ([found % block_size] if found % block_size else [])
        assert output_of(last["runs"]) == output_of(ask(make(block_size)[0], first))


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("samples", [1, 3])
def test_what_a_preempted_turn_finds_again_is_counted_once(block_size: int, samples: int) -> None:
    """Its own tokens are in the cache after the preemption; the client's prompt hit what it hit."""
    for at in range(1, OUTPUT):
        engine, toy = make(block_size)
        first = prompt_of(block_size + 2)
        known = first + output_of(ask(engine, first))
        toy.take()
        params = SamplingParams(
            n=samples, seed=4, temperature=1.0, max_tokens=OUTPUT, ignore_eos=True
        )
        engine.add_request("turn", {"prompt_token_ids": [*known, 1, 2]}, params)
        for _ in range(at):
            engine.step()
        scheduler = engine.core.scheduler
        (request,) = scheduler._roster.running
        scheduler._roster.preempt(request)
        output = run(engine)["turn"]
        assert output.num_cached_tokens == len(known) - 1
        steps = toy.take()
        # It found again all that it had computed, and a lone sample computes nothing twice.
        if samples == 1:
            assert computed(steps) == 3 + OUTPUT - 1
        straight, _ = make(block_size)
        straight.add_request("turn", {"prompt_token_ids": [*known, 1, 2]}, params)
        want = run(straight)["turn"]
        assert [o.token_ids for o in output.outputs] == [o.token_ids for o in want.outputs]


@pytest.mark.parametrize("block_size", SIZES)
def test_a_preemption_for_want_of_blocks_changes_no_count(block_size: int) -> None:
    """The same in a pool that two turns outgrow while they run."""
    first = [prompt_of(3 * block_size), [other(token) for token in prompt_of(3 * block_size)]]
    need = -(-(len(first[0]) + 3 * OUTPUT + 1) // block_size)
    engine, toy = make(block_size, num_blocks=2 * need - 1)
    known = [prompt + output_of(ask(engine, prompt, 1)) for prompt in first]
    for i, prompt in enumerate(known):
        add(engine, str(i), [*prompt, 1], 3 * OUTPUT)
    toy.take()
    last = run(engine)
    assert engine.core.scheduler.stats.num_preemptions > 0
    for i, prompt in enumerate(known):
        assert last[str(i)].num_cached_tokens == len(prompt) - 1
        want = output_of(ask(make(block_size)[0], [*prompt, 1], 3 * OUTPUT))
        assert output_of(last[str(i)]) == want


@pytest.mark.parametrize("block_size", SIZES)
def test_two_next_turns_of_one_conversation(block_size: int) -> None:
    """Both take over the tail; the one that may not write to it copies its filled slots.

    In blocks of one token there is no tail: the second waits a step for the last common token.
    """
    engine, toy = make(block_size)
    first = prompt_of(block_size + 1)
    known = first + output_of(ask(engine, first))
    toy.take()
    add(engine, "a", [*known, 1], max_tokens=2)
    add(engine, "b", [*known, 2], max_tokens=2)
    engine.step()
    (step,) = toy.take()
    last = run(engine)
    cached = len(known) - 1
    waits = block_size == 1
    assert [last[name].num_cached_tokens for name in "ab"] == [cached, cached + waits]
    assert step.query_lens.tolist() == ([2] if waits else [2, 2])
    assert copied([step]) == ([] if waits else [cached % block_size])
    assert len(np.unique(step.slots)) == (2 if waits else 4)
