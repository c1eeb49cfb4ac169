"""What a request gives when it is alone: by the engine with room for everything, and by no engine.

`drawn` shares no code with the engine: it is a plain loop around the toy model's arithmetic.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from harness import VOCAB, Run

from pagedkv.engine.toy import chain, mix, uniform
from pagedkv.scheduling.messages import Add, Delta
from pagedkv.scheduling.step import TokenLogprobs


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


class Drawn(NamedTuple):
    """The tokens of one sample, why it ended, and the stop token that ended it."""

    tokens: tuple[int, ...]
    finish_reason: str
    stop_reason: int | None


def drawn(add: Add, sample: int, eos: tuple[int, ...], max_model_len: int) -> Drawn:
    """What the toy model draws for one sample, token by token, in a pool without end.

    A token that ends the sample is drawn no earlier than after `min_tokens` others.
    """
    params = add.params
    return _drawn(
        add.prompt,
        add.seed + sample if params.temperature > 0 else None,
        params.min_tokens,
        min(params.max_tokens, max_model_len - len(add.prompt)),
        frozenset(params.stop_token_ids),
        frozenset(() if params.ignore_eos else eos),
    )


@lru_cache(maxsize=4096)
def _drawn(
    prompt: tuple[int, ...],
    key: int | None,
    at_least: int,
    at_most: int,
    named: frozenset[int],
    silent: frozenset[int],
) -> Drawn:
    vocab = mix(np.arange(VOCAB, dtype=np.uint64))
    before = mix(np.zeros(1, np.uint64))
    for position, token in enumerate(prompt):
        before = chain(before, np.array([token], np.int32), np.array([position]))
    tokens: list[int] = []
    while True:
        position = len(prompt) + len(tokens)
        noise = np.uint64(0)
        if key is not None:
            noise = mix(np.array([key | position << 32], np.uint64))
        values = uniform(mix(before ^ noise ^ vocab)).tolist()
        allowed = set(range(VOCAB)) - (named | silent if len(tokens) < at_least else set())
        token = min(allowed, key=lambda token: (-values[token], token))
        tokens.append(token)
        before = chain(before, np.array([token], np.int32), np.array([position]))
        if len(tokens) > at_least and token in named | silent:
            return Drawn(tuple(tokens), "stop", None if token in silent else token)
        if len(tokens) == at_most:
            return Drawn(tuple(tokens), "length", None)
