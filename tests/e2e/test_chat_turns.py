"""Conversations with the embedded model: later turns take over what earlier ones computed."""

from __future__ import annotations

from itertools import takewhile

import pytest

from pagedkv import LLM, SamplingParams
from pagedkv.engine.output import RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=10)
TURNS = ("What is a block table?", "Shorter, please.", "And a page fault?")


def talk(block_size: int, caching: bool) -> list[RequestOutput]:
    """Each turn's output; an answer is part of the next turn's prompt."""
    llm = LLM(
        "smollm2-135m-instruct",
        dtype="float32",
        num_blocks=512,
        block_size=block_size,
        deterministic=True,
        enable_prefix_caching=caching,
    )
    messages: list[dict[str, str]] = []
    outputs = []
    for question in TURNS:
        messages.append({"role": "user", "content": question})
        outputs += llm.chat(messages, GREEDY)
        messages.append({"role": "assistant", "content": outputs[-1].outputs[0].text})
    return outputs


def answers(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.fixture(scope="module")
def cold() -> list[RequestOutput]:
    """The conversation where every turn computes everything."""
    outputs = talk(16, caching=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]
    return outputs


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_turns_take_over_what_was_computed_and_change_no_token(
    block_size: int, cold: list[RequestOutput]
) -> None:
    warm = talk(block_size, caching=True)
    assert answers(warm) == answers(cold)
    computed: list[int] = []
    for output in warm:
        prompt = list(output.prompt_token_ids)
        # The template writes the answer's text anew: what that has in common with the ids counts.
        assert output.num_cached_tokens == min(common(prompt, computed), len(prompt) - 1)
        # All of the turn before, but for an end token that the text does not show.
        assert output.num_cached_tokens >= len(computed) - 1
        computed = [*prompt, *output.outputs[0].token_ids][:-1]
