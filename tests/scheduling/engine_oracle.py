"""What a request gives when it is alone, and an executor that goes wrong on demand."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from harness import VOCAB, Run

from pagedkv.engine.toy import ToyExecutor
from pagedkv.scheduling.messages import Add, Delta
from pagedkv.scheduling.step import Result, Step, TokenLogprobs

FAULTS = ("submit", "collect", "interrupt", "samples", "tokens", "type", "row", "silent")


class Sampled(NamedTuple):
    """One sample of a request as the client sees it."""

    tokens: tuple[int, ...]
    logprobs: tuple[object, ...]
    finish_reason: str | None
    stop_reason: int | None
    score: float | None


def plain(scores: TokenLogprobs | None) -> object:
    return scores and (scores.ids.tolist(), scores.values.tobytes(), scores.rank)


def sampled(deltas: list[Delta], sample: int) -> Sampled:
    own = [delta for delta in deltas if delta.sample == sample]
    return Sampled(
        tuple(token for delta in own for token in delta.token_ids),
        tuple(plain(scores) for delta in own for scores in delta.logprobs),
        own[-1].finish_reason if own else None,
        own[-1].stop_reason if own else None,
        own[-1].score if own else None,
    )


def prompt_scores(deltas: list[Delta]) -> list[object]:
    return [plain(scores) for delta in deltas for scores in delta.prompt_logprobs]


@dataclass
class Sent:
    """A request that was sent, and what has come of it."""

    add: Add
    deltas: list[Delta] = field(default_factory=list)
    ends: dict[int, Delta] = field(default_factory=dict)
    disturbed: bool = False  # aborted or failed, in part or as a whole
    cut: bool = False  # was alone and outgrew the pool
    computed: int = 0
    seqs: set[int] = field(default_factory=set)

    @property
    def n(self) -> int:
        return self.add.params.n

    @property
    def ended(self) -> bool:
        return len(self.ends) == self.n

    @property
    def open_samples(self) -> list[int]:
        return [i for i in range(self.n) if i not in self.ends]


@lru_cache(maxsize=4096)
def _alone(add: bytes, eos: tuple[int, ...], max_model_len: int) -> tuple[Delta, ...]:
    run = Run(100, 16, 300, 8, max_model_len, eos, prefix_caching=False)
    run.core.send(pickle.loads(add))
    deltas: list[Delta] = []
    while run.core.has_unfinished():
        deltas += run.core.step(0.0)[0]
    return tuple(deltas)


def alone(add: Add, sample: int, eos: tuple[int, ...], max_model_len: int) -> list[Delta]:
    """Deltas of one sample in an engine with room for everything: of a request by itself.

    Of beams those of all; the others are not independent of them.
    """
    lone = replace(add, request_id="", arrival=0.0, tenant=None, cache_salt=None)
    if add.beam is None:
        lone = replace(lone, params=replace(add.params, n=1), seed=add.seed + sample)
    return list(_alone(pickle.dumps(lone), eos, max_model_len))


class Interrupt(BaseException):
    """Stands for Ctrl-C, which would end the test run as well."""


class FaultyExecutor(ToyExecutor):
    """Goes wrong in the next step, in the way that `fault` names, and then no more."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, VOCAB)
        self.fault: str | None = None
        self.row = 0
        self.step: Step | None = None

    def submit(self, step: Step):
        self.step = step
        if self.fault == "submit":
            self.fault = None
            raise RuntimeError("submit")
        return super().submit(step)

    def collect(self, ticket):
        result = super().collect(ticket)
        fault, self.fault = self.fault, None
        if fault == "collect":
            raise RuntimeError("collect")
        if fault == "interrupt":
            raise Interrupt
        return result if fault is None else self.spoiled(fault, result)

    def spoiled(self, fault: str, result: Result) -> Result:
        if fault == "samples":
            return replace(result, indptr=result.indptr[:-1])
        if fault == "tokens":
            return replace(result, tokens=np.append(result.tokens, np.int32(VOCAB)))
        if fault == "type":
            return replace(result, tokens=result.tokens.tolist())
        if fault == "row":
            return replace(result, errors={**result.errors, self.row: "row"})
        return replace(  # silent: the first sample draws nothing
            result,
            tokens=result.tokens[1:],
            indptr=np.maximum(result.indptr - 1, 0),
            logprobs=result.logprobs[1:],
        )

    def failing(self, fault: str, step: Step) -> list[int] | None:
        """Rows that the fault ends; None for the whole step."""
        if fault == "row":
            return [self.row]
        if fault == "silent":
            return [step.samples[0].row] if step.samples else []
        return None
