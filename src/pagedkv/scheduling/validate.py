"""What is refused: requests that can never run, before anything is allocated; misfit Results."""

from __future__ import annotations

import numpy as np

from pagedkv.errors import RequestError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.step import Result, Step


def validate_add(add: Add, config: SchedulerConfig, num_blocks: int, block_size: int) -> None:
    """Raises RequestError naming the field, its value and the limit."""
    params = add.params
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
    if params.n > config.max_num_seqs:
        raise RequestError(
            f"n={params.n} is more than max_num_seqs={config.max_num_seqs}: the samples of a "
            "request run together, ask for fewer"
        )
    for token in (*params.stop_token_ids, *params.logit_bias):
        if token >= vocab:
            raise RequestError(f"token id {token} is outside the vocabulary [0, {vocab})")


def _check_tokens(add: Add, vocab: int) -> None:
    prompt = np.asarray(add.prompt)
    if prompt.ndim != 1 or prompt.dtype.kind != "i":
        raise RequestError(f"prompt of {add.request_id!r} must be a flat sequence of int token ids")
    bad = np.flatnonzero((prompt < 0) | (prompt >= vocab))
    if len(bad):
        raise RequestError(
            f"token id {prompt[bad[0]]} at position {bad[0]} is outside the vocabulary [0, {vocab})"
        )


def result_mismatch(step: Step, result: Result) -> str | None:
    """What makes the Result unfit as an answer to the Step, None when it fits."""
    samples, scores = len(result.indptr) - 1, len(result.prompt_logprobs)
    if (samples, scores) != (len(step.samples), len(step.prompt_scores)):
        return (
            f"the executor reported {samples} samples and {scores} prompt scores for a step of "
            f"{len(step.samples)} and {len(step.prompt_scores)}"
        )
    for asked, got in zip(step.prompt_scores, result.prompt_logprobs, strict=True):
        if len(asked.targets) != len(got) and asked.row not in result.errors:
            return f"the executor scored {len(got)} of {len(asked.targets)} prompt tokens"
    strange = [row for row in result.errors if not 0 <= row < len(step.seqs)]
    if strange:
        return f"the executor reports an error in row {strange[0]} of {len(step.seqs)}"
    return None
