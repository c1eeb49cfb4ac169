"""The raw logits of every draw of an engine, and what the reference says about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

import pagedkv.engine.executor
from pagedkv import LLM, SamplingParams

TOLERANCE = 1e-3


class RecordedDraw(NamedTuple):
    key: int  # seed + sample index
    position: int  # of the token that is drawn
    logits: torch.Tensor  # float32 [V], before any processing


@contextmanager
def recording_draws() -> Iterator[list[RecordedDraw]]:
    """Every draw of every model executor inside the block, in order."""
    draws: list[RecordedDraw] = []
    draw_all = pagedkv.engine.executor.draw_all

    def record(logits, rows, samples, *grammars):
        for row, sample in zip(rows, samples, strict=True):
            draws.append(RecordedDraw(sample.key, sample.position, logits[row].clone()))
        return draw_all(logits, rows, samples, *grammars)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pagedkv.engine.executor, "draw_all", record)
        yield draws


@dataclass
class Generated:
    """One greedy request: its tokens, the logits [len(output), V] behind them, its hits."""

    prompt: list[int]
    output: list[int]
    logits: torch.Tensor
    num_cached_tokens: int


def generate(llm: LLM, prompts: Sequence[str | list[int]], max_tokens: int) -> list[Generated]:
    """All prompts at once, greedily; the pool must be large enough that none is preempted."""
    requests = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]
    params = [
        SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=i)
        for i in range(len(prompts))
    ]
    with recording_draws() as draws:
        outputs = llm.generate(requests, params)
    by_request: dict[int, dict[int, torch.Tensor]] = {}
    for draw in draws:
        assert draw.position not in by_request.setdefault(draw.key, {}), "drawn twice"
        by_request[draw.key][draw.position] = draw.logits
    results = []
    for i, output in enumerate(outputs):
        prompt, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        rows = [by_request[i][len(prompt) + j] for j in range(max_tokens)]
        results.append(Generated(prompt, tokens, torch.stack(rows), output.num_cached_tokens))
    return results


def teacher_forced(
    reference: PreTrainedModel, sequences: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """The reference's logits [len(s), V] of every sequence, in one batch padded at its right.

    Attention is causal, so what stands behind a sequence changes nothing in it.
    """
    width = max(map(len, sequences))
    ids = torch.tensor([[*s, *[0] * (width - len(s))] for s in sequences])
    with torch.inference_mode():
        logits = reference(ids).logits.float()
    return [row[: len(s)] for row, s in zip(logits, sequences, strict=True)]


class Ties:
    """Counts draws, and those where the reference itself was undecided: at most 1 in 500."""

    def __init__(self) -> None:
        self.draws = self.ties = 0

    def compare(self, want: torch.Tensor, output: Sequence[int]) -> None:
        """want [n, V]: each of the n tokens must be the reference's choice after our own prefix."""
        assert len(want) == len(output)
        best = want.max(dim=-1).values
        ours = want.gather(1, torch.tensor(output)[:, None])[:, 0]
        behind = (best - ours).tolist()
        self.draws += len(behind)
        self.ties += sum(0 < gap < TOLERANCE for gap in behind)
        wrong = [i for i, gap in enumerate(behind) if gap >= TOLERANCE]
        assert not wrong, f"token {wrong[0]} is {behind[wrong[0]]} behind the reference's best"

    def finish(self) -> None:
        assert self.draws and self.ties * 500 <= self.draws, f"{self.ties} ties in {self.draws}"


def compare_generated(reference: PreTrainedModel, runs: Sequence[Generated], ties: Ties) -> None:
    """Raw logits within the tolerance at every draw, and tokens but for ties."""
    wanted = teacher_forced(reference, [run.prompt + run.output for run in runs])
    for run, want in zip(runs, wanted, strict=True):
        want = want[len(run.prompt) - 1 : -1]
        assert want.shape == run.logits.shape
        difference = float((run.logits - want).abs().max())
        assert difference < TOLERANCE, (
            f"{difference} off after {run.num_cached_tokens} of {len(run.prompt)} cached tokens"
        )
        ties.compare(want, run.output)
