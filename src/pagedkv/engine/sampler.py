"""From logits to tokens, one row at a time.

A row's result depends on its own logits, parameters, key and position and on nothing else: the
random number is a function of (key, position), and no reduction runs across rows. So the same
sample gives the same token whatever its batch is, and again after a preemption.

The order of the filters is vLLM's: logit_bias, forbidden tokens and those that the output's form
does not allow, penalties, temperature, min_p, top_k, top_p. Log-probabilities are the model's own:
before any of these.

Symbols: V vocabulary size, m samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pagedkv.engine.filters import Float64, choose
from pagedkv.engine.grammar import Bool, Grammars
from pagedkv.errors import GrammarError
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.step import Float32, Int32, Int64, Sample, TokenLogprobs

_KEY_MASK = 2**64 - 1


class Draw(NamedTuple):
    """The outcome of one Sample: a token, or why there is none (`error`).

    complete: the output's form allows nothing after the token.
    """

    token: int = -1
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    complete: bool = False


class Draws(NamedTuple):
    """The outcome of m samples.

    errors: by index, ascending, why a sample has no token; tokens and logprobs are of the others.
    complete: indices, ascending, of those whose form allows nothing after the token.
    """

    tokens: Int32
    logprobs: tuple[TokenLogprobs | None, ...]
    errors: dict[int, str]
    complete: tuple[int, ...]

    @classmethod
    def of(cls, draws: Sequence[Draw]) -> Draws:
        drawn = [draw for draw in draws if draw.error is None]
        return cls(
            np.array([draw.token for draw in drawn], np.int32),
            tuple([draw.logprobs for draw in drawn]),
            {i: draw.error for i, draw in enumerate(draws) if draw.error is not None},
            tuple([i for i, draw in enumerate(draws) if draw.complete]),
        )


def uniform(key: int, position: int) -> float:
    """The random number in [0, 1) that belongs to (key, position): Philox 4x64-10, first word.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    word = np.random.Philox(key=key & _KEY_MASK, counter=position).random_raw()
    return float((int(word) >> 11) * 2.0**-53)


def draw_all(
    logits: torch.Tensor,
    rows: Sequence[int] | Int64,
    samples: Sequence[Sample],
    grammars: Grammars | None = None,
    best: torch.Tensor | None = None,
    plain: bool = False,
) -> Draws:
    """Draws one token for each sample. `samples[i]` reads `logits[rows[i]]` (float32 [r, V]).

    A row without a finite maximum, or with every token forbidden, is an error of its samples only;
    so is what goes wrong with a sample's grammar. grammars: of the model; None: it has none.
    best: int64 [>= r], as `Decoder.forward` fills it; None: it is looked for.
    plain: whether all samples are `best` ones: they are not looked at one by one then.
    """
    if not samples:
        return Draws.of([])
    if grammars is not None:
        grammars.begin()
    host, which = logits.cpu().numpy(), np.asarray(rows)
    # The first of the largest logits; NaN, if there is one, counts as the largest.
    first = host[which].argmax(axis=1) if best is None else best.cpu().numpy()[which]
    largest = host[which, first]
    finites = np.isfinite(largest)
    if plain and finites.all():
        return Draws(first.astype(np.int32), (None,) * len(samples), {}, ())
    each = zip(which.tolist(), samples, first.tolist(), finites.tolist(), strict=True)
    draws = []
    for i, (row, sample, token, finite) in enumerate(each):
        if not finite:
            why = f"the model gave no finite logits (largest: {largest[i]})"
            draws.append(Draw(error=why))
        elif sample.best:
            draws.append(Draw(token))
        elif sample.params.structured_outputs is not None:
            draws.append(_draw_constrained(host[row], sample, grammars))
        else:
            draws.append(draw(host[row], sample))
    return Draws.of(draws)


def _draw_constrained(logits: Float32, sample: Sample, grammars: Grammars | None) -> Draw:
    """Draws a token that the sample's form allows."""
    if grammars is None:
        return Draw(error="the output cannot be given a form: the model has no tokenizer")
    try:
        constraint = grammars.constraint(sample)
        drawn = draw(logits, sample, constraint.allowed)
        if drawn.error is None:
            drawn = drawn._replace(complete=grammars.advance(constraint, drawn.token))
    except GrammarError as error:
        return Draw(error=str(error))
    return drawn


def draw(logits: Float32, sample: Sample, allowed: Bool | None = None) -> Draw:
    """Draws one token from one row of finite logits (float32 [V], not changed).

    allowed: bool [V], the tokens that may be drawn at all; None: each of them.
    """
    params = sample.params
    plain = allowed is None and _is_plain(sample)
    scores = logits if plain else _adjust(logits, sample, allowed)
    if not np.isfinite(scores.max()):
        return Draw(error="every token of the vocabulary is forbidden at this position")
    if params.greedy:
        token = int(scores.argmax())
    else:
        token = choose(scores, params, uniform(sample.key, sample.position))
    wanted = params.logprobs
    return Draw(token, None if wanted is None else score_token(log_softmax(logits), token, wanted))


def log_softmax(logits: Float32) -> Float32:
    """Over the last axis, reduced in float64: float32 [..., V]."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide.astype(np.float32)


def score_token(logprobs: Float32, token: int, top: int) -> TokenLogprobs:
    """The token's log-probability and rank, then the `top` best alternatives (ties: lower id)."""
    ids = np.array([token], np.int32)
    if top > 0:
        top = min(top, len(logprobs))
        # Everything as good as the top-th best, so that ties are settled by id and nothing else.
        floor = np.partition(logprobs, len(logprobs) - top)[len(logprobs) - top]
        candidates = np.flatnonzero(logprobs >= floor)
        order = np.argsort(-logprobs[candidates], kind="stable")[:top]
        ids = np.concatenate([ids, candidates[order].astype(np.int32)])
    rank = 1 + int(np.count_nonzero(logprobs > logprobs[token]))
    return TokenLogprobs(ids, logprobs[ids], rank)


def _is_plain(sample: Sample) -> bool:
    """Whether the token is drawn by the model's own logits."""
    params = sample.params
    return not (
        params.logit_bias
        or params.has_penalties
        or sample.forbidden
        or params.structured_outputs is not None
    )


def _adjust(logits: Float32, sample: Sample, allowed: Bool | None) -> Float64:
    """Bias, forbidden tokens, penalties: float64 [V], a copy."""
    params = sample.params
    scores = logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    scores[list(sample.forbidden)] = -np.inf
    if allowed is not None:
        scores[~allowed] = -np.inf
    if params.has_penalties:
        _penalise(scores, params, sample.prompt, sample.output)
    return scores


def _penalise(
    scores: Float64, params: SamplingParams, prompt: Int32 | None, output: Int32 | None
) -> None:
    """Repetition over prompt and output (CTRL, Keskar 2019), the other two over the output."""
    empty = np.zeros(0, np.int32)
    prompt = empty if prompt is None else prompt
    output = empty if output is None else output
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate([prompt, output]))
        values = scores[seen]
        scores[seen] = np.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    drawn, counts = np.unique(output, return_counts=True)
    scores[drawn] -= params.frequency_penalty * counts + params.presence_penalty
