"""The embedded model in a pool a quarter of what its requests need: every token is the same."""

from __future__ import annotations

import pytest

from pagedkv import LLM, SamplingParams, TierConfig
from pagedkv.scheduling.policies import POLICIES

PROMPTS = [
    f"Item {i}: explain in a few words {what}."
    for i, what in enumerate(
        (
            "what a block table is",
            "why the sky is blue at noon and red in the evening",
            "how a letter travels from one town to another",
            "who wrote the first dictionaries",
            "what bread is made of, and how",
            "how bridges carry weight",
        )
    )
]
OUTPUT, BLOCK = 32, 16


def answers(llm: LLM) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.8, seed=1, ignore_eos=True)
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


def make(**settings: object) -> LLM:
    return LLM(
        "smollm2-135m-instruct",
        dtype="bfloat16",
        max_model_len=256,
        deterministic=True,
        **settings,
    )


@pytest.fixture(scope="module")
def unpressed() -> tuple[list[tuple[int, ...]], int]:
    """The tokens, and the blocks that all requests together take."""
    llm = make(num_blocks=100)
    tokens = answers(llm)
    lengths = [len(llm.get_tokenizer()(prompt).input_ids) + OUTPUT for prompt in PROMPTS]
    return tokens, sum(-(-length // BLOCK) for length in lengths)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_tokens_do_not_depend_on_pressure(
    policy: str, unpressed: tuple[list[tuple[int, ...]], int]
) -> None:
    expected, blocks = unpressed
    llm = make(
        num_blocks=blocks // 4,
        scheduling={"policy": policy, "recovery": "swap"},
        tiers=TierConfig(host_memory=2**26),
    )
    assert answers(llm) == expected
    assert llm.engine.core.scheduler.stats.num_preemptions > 0
    assert llm.engine.tiering is not None and llm.engine.tiering.loaded > 0
