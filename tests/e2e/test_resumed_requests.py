"""A real model: a request that is cut at any token and resumed elsewhere draws the same tokens."""

from __future__ import annotations

import pytest
from tiny_llm import save_tiny_llm

from pagedkv import LLM, SamplingParams
from pagedkv.engine.core import EngineCore
from pagedkv.scheduling.messages import Add, Delta, Drawn, Resume
from pagedkv.scheduling.params import BeamSearchParams
from pagedkv.scheduling.structured import StructuredOutputs

PROMPT = tuple(b"the quick brown fox jumps over")
ADDS = [
    Add("greedy", PROMPT, SamplingParams(temperature=0.0, max_tokens=9), 0.0, 1),
    Add("group", PROMPT[:20], SamplingParams(n=3, max_tokens=6, top_k=20), 0.0, 7),
    Add(
        "penalties",
        PROMPT[:17],
        SamplingParams(
            max_tokens=12,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            frequency_penalty=0.4,
            logprobs=2,
        ),
        0.0,
        3,
    ),
    Add(
        "stops",
        PROMPT[5:],
        SamplingParams(n=2, max_tokens=20, stop_token_ids=range(97, 110), min_tokens=3),
        0.0,
        11,
    ),
    Add(
        "form",
        PROMPT[2:12],
        SamplingParams(max_tokens=12, structured_outputs=StructuredOutputs(regex="[a-f]{4,9}")),
        0.0,
        5,
    ),
    Add("beams", PROMPT[:9], BeamSearchParams(3, 6).sampling, 0.0, 0, beam=BeamSearchParams(3, 6)),
]
Sample = tuple[tuple[int, ...], tuple[tuple[float, ...], ...], str | None, int | None]


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> list[EngineCore]:
    """Two of one model, with blocks of different sizes."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(folder)
    return [
        LLM(
            folder,
            deterministic=True,
            attention_backend="native",
            num_blocks=640 // size,
            block_size=size,
            max_num_batched_tokens=64,
        ).engine.core
        for size in (16, 4)
    ]


def steps(core: EngineCore, most: int = 1000) -> list[Delta]:
    deltas: list[Delta] = []
    while core.has_unfinished() and most:
        deltas += core.step(0.0)[0]
        most -= 1
    return deltas


def sample(deltas: list[Delta], i: int) -> Sample:
    own = [delta for delta in deltas if delta.sample == i]
    scores = [score for delta in own for score in delta.logprobs if score is not None]
    return (
        tuple(token for delta in own for token in delta.token_ids),
        tuple(tuple(score.values.tolist()) for score in scores),
        own[-1].finish_reason if own else None,
        own[-1].stop_reason if own else None,
    )


@pytest.mark.parametrize("add", ADDS, ids=lambda add: add.request_id)
def test_cut_anywhere(cores: list[EngineCore], add: Add) -> None:
    """By the worker itself, as for a move; and by what a front end has of one that has died."""
    old, new = cores
    n = add.params.n
    old.send(add)
    whole = [sample(deltas, i) for deltas in [steps(old)] for i in range(n)]
    old.reset_prefix_cache()
    cut = 1
    while True:
        old.send(add)
        before = steps(old, cut)
        if add.request_id not in old.scheduler:
            break
        moved = old.release(add.request_id, 0.0)
        had = [sample(before, i) for i in range(n)]
        told = Resume(add, tuple(Drawn(had[i][0], had[i][2]) for i in range(n)))
        for resume in (moved, told):
            new.send(resume)
            after = steps(new)
            new.reset_prefix_cache()
            for i in range(n):
                tokens, scores, reason, stop = sample(after, i)
                joined = had[i][0] + tokens, had[i][1] + scores, had[i][2] or reason
                assert (*joined, had[i][3] or stop) == whole[i], (cut, resume)
        old.reset_prefix_cache()
        cut += 1
    assert cut > 3
    for core in cores:
        assert core.scheduler.manager.num_held_blocks == 0
