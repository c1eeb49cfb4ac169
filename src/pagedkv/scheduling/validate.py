"""What is refused: requests that can never run, before anything is allocated; misfit Results."""

from __future__ import annotations

import math

import numpy as np

from pagedkv.errors import DrainingError, OverloadError, RequestError
from pagedkv.scheduling.beams import check_beams
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.step import Result, Step

# Every number is worth some seconds of waiting: with a bound to it, waiting has a bound.
MAX_PRIORITY = 1000


def validate_add(add: Add, config: SchedulerConfig, num_blocks: int, block_size: int) -> None:
    """Raises RequestError naming the field, its value and the limit."""
    params = add.params
    _check_envelope(add)
    length = len(add.prompt)
    if length == 0:
        raise RequestError("the prompt is empty: give at least one token")
    vocab = config.vocab_size or 2**31
    _check_tokens(add, vocab)
    if length >= config.max_model_len:
        raise RequestError(
            f"the prompt has {length} tokens and max_model_len={config.max_model_len} leaves no "
            f"room for output: give at most {config.max_model_len - 1} tokens"
        )
    needed = -(-length // block_size)
    if needed > num_blocks:
        raise RequestError(
            f"the prompt of {length} tokens takes {needed} blocks of {block_size}, the pool has "
            f"{num_blocks}: give at most {num_blocks * block_size} tokens or a larger pool"
        )
    check_beams(add, config)
    if params.n > config.seats:
        raise RequestError(
            f"{'n' if add.beam is None else 'beam_width'}={params.n} is more than the "
            f"{config.seats} sequences that run at once "
            f"(max_num_seqs={config.max_num_seqs}, "
            f"max_num_batched_tokens={config.max_num_batched_tokens}): the samples of a request "
            "run together, ask for fewer"
        )
    for field in ("stop_token_ids", "logit_bias"):
        for token in getattr(params, field):
            if token >= vocab:
                raise RequestError(
                    f"{field} has token id {token}, which is outside the vocabulary [0, {vocab})"
                )


def refusal_type(error: RequestError) -> str:
    """Which of ERROR_TYPES a refusal is."""
    if isinstance(error, OverloadError):
        return "overload"
    return "draining" if isinstance(error, DrainingError) else "invalid"


def check_queue(add: Add, config: SchedulerConfig, waiting: int, tokens: int) -> None:
    """Raises OverloadError if the queue, `waiting` requests of `tokens` prompt tokens, is full.

    A request of n samples counts n here. An empty queue takes any request.
    """
    check_room(config, add.params.n, len(add.prompt), waiting, tokens)


def check_room(
    config: SchedulerConfig, samples: int, length: int, waiting: int, tokens: int
) -> None:
    """The same for a request of so many samples and prompt tokens."""
    most = config.max_num_waiting
    if most is not None and waiting and waiting + samples > most:
        more = "" if samples == 1 else f", this one counts {samples}, for its samples"
        raise OverloadError(
            f"{waiting} requests wait and max_num_waiting={most}{more}: try again later, or "
            "elsewhere"
        )
    most = config.max_waiting_tokens
    if most is not None and waiting and tokens + length > most:
        raise OverloadError(
            f"{waiting} requests of {tokens} prompt tokens wait, with the {length} of this one "
            f"more than max_waiting_tokens={most}: try again later, or elsewhere"
        )


def _check_envelope(add: Add) -> None:
    """What comes with a prompt: everything the scheduler compares, hashes or encodes later."""
    for name, text in (("tenant", add.tenant), ("cache_salt", add.cache_salt)):
        if text is None:
            continue
        if not isinstance(text, str):
            raise RequestError(f"{name}={text!r:.200} must be a string")
        if not text:
            raise RequestError(f"{name}='' is empty: give some text, or None for none")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"{name}={text!r:.200} is not valid Unicode: {error}") from None
    if not _is_time(add.arrival):
        raise RequestError(f"arrival time {add.arrival!r:.200} must be a finite number of seconds")
    for name, seconds in (("ttft_slo", add.ttft_slo), ("tpot_slo", add.tpot_slo)):
        if seconds is not None and not (_is_time(seconds) and seconds > 0):
            raise RequestError(
                f"{name}={seconds!r:.200} must be a finite number of seconds above 0"
            )
    if add.deadline is not None and not _is_time(add.deadline):
        raise RequestError(
            f"deadline={add.deadline!r:.200} must be a finite number of seconds on the clock of "
            "the arrival time"
        )
    for name, value in (("priority", add.priority), ("seed", add.seed)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(f"{name}={value!r} must be an integer")
    if abs(add.priority) > MAX_PRIORITY:
        raise RequestError(
            f"priority={add.priority} must be from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        )


def _is_time(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False


def _check_tokens(add: Add, vocab: int) -> None:
    try:
        prompt = np.asarray(add.prompt)
    except ValueError:  # lists of different lengths
        prompt = np.zeros(0)
    if prompt.ndim != 1 or prompt.dtype.kind != "i":
        raise RequestError(f"prompt of {add.request_id!r} must be a flat sequence of int token ids")
    bad = np.flatnonzero((prompt < 0) | (prompt >= vocab))
    if len(bad):
        raise RequestError(
            f"token id {prompt[bad[0]]} at position {bad[0]} is outside the vocabulary [0, {vocab})"
        )


def result_mismatch(step: Step, result: Result, vocab_size: int | None) -> str | None:
    """What makes the Result unfit as an answer to the Step, None when it fits."""
    return (
        _shape_mismatch(step, result)
        or _token_mismatch(result, vocab_size or 2**31)
        or _score_mismatch(step, result, vocab_size or 2**31)
    )


def _shape_mismatch(step: Step, result: Result) -> str | None:
    """Types, counts of samples and prompt scores, and the rows that are named."""
    for name, array in (
        ("tokens", result.tokens),
        ("indptr", result.indptr),
        ("parents", result.parents),
    ):
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind != "i":
            return f"the executor reported {name}={array!r:.200}: a flat array of int is wanted"
    samples, scores = len(result.indptr) - 1, len(result.prompt_logprobs)
    if (samples, scores) != (len(step.samples), len(step.prompt_scores)):
        return (
            f"the executor reported {samples} samples and {scores} prompt scores for a step of "
            f"{len(step.samples)} and {len(step.prompt_scores)}"
        )
    rows = [sample.row for sample in step.samples]
    if result.parents.tolist() != rows:
        return f"the executor continues rows {result.parents.tolist()} where {rows} were sampled"
    complete = result.complete
    if not isinstance(complete, tuple) or any(not 0 <= i < samples for i in complete):
        return f"the executor says that samples {complete!r:.200} of {samples} are complete"
    strange = [row for row in result.errors if not 0 <= row < len(step.seqs)]
    if strange:
        return f"the executor reports an error in row {strange[0]} of {len(step.seqs)}"
    return None


def _token_mismatch(result: Result, vocab: int) -> str | None:
    tokens, indptr = result.tokens, result.indptr
    if indptr[0] != 0 or indptr[-1] != len(tokens) or (indptr[1:] < indptr[:-1]).any():
        return f"the executor's bounds {indptr.tolist()} do not divide {len(tokens)} tokens"
    bad = tokens[(tokens < 0) | (tokens >= vocab)]
    if len(bad):
        return f"the executor drew token {bad[0]}, which is outside the vocabulary [0, {vocab})"
    return None


def _score_mismatch(step: Step, result: Result, vocab: int) -> str | None:
    """Log-probabilities: one a drawn token where they were asked for, one a prompt token.

    With a drawn token come all the alternatives asked for: beams are chosen among them.
    """
    num_scored, num_tokens = len(result.logprobs), len(result.tokens)
    if num_scored not in (0, num_tokens):
        return f"the executor scored {num_scored} of {num_tokens} drawn tokens"
    for i, sample in enumerate(step.samples):
        if sample.params.logprobs is None:
            continue
        drawn = slice(int(result.indptr[i]), int(result.indptr[i + 1]))
        wanted = 1 + min(sample.params.logprobs, vocab)
        for scored in result.logprobs[drawn] or (None,) * (drawn.stop - drawn.start):
            if scored is None:
                return f"the executor left out log-probabilities that sample {i} asks for"
            if not len(scored.ids) == len(scored.values) == wanted:
                return f"the executor scored {len(scored.ids)} of {wanted} tokens for sample {i}"
    for asked, got in zip(step.prompt_scores, result.prompt_logprobs, strict=True):
        if len(asked.targets) != len(got) and asked.row not in result.errors:
            return f"the executor scored {len(got)} of {len(asked.targets)} prompt tokens"
    return None
