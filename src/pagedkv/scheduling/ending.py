"""When a sample ends, and how it says so."""

from __future__ import annotations

from typing import NamedTuple

from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.request import Bounds, Output, Request


class Ending(NamedTuple):
    """Finish reason (None: goes on), the stop token that caused it, and why it was cut short."""

    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None


GOES_ON = Ending()


def bounds_of(add: Add, config: SchedulerConfig, capacity: int) -> Bounds:
    """What `find_ending` has to be asked for. `capacity`: tokens the pool holds of a sequence."""
    params = add.params
    eos = () if params.ignore_eos else config.eos_token_ids
    most = min(config.max_model_len, capacity + 1) - len(add.prompt)
    if params.max_tokens is not None:
        most = min(most, params.max_tokens)
    return Bounds(frozenset((*eos, *params.stop_token_ids)), most)


def ending_tokens(request: Request, eos: tuple[int, ...]) -> tuple[int, ...]:
    """Token ids that end a sample of the request."""
    own = tuple(request.params.stop_token_ids)
    return own if request.params.ignore_eos else eos + own


def find_ending(request: Request, output: Output, config: SchedulerConfig, capacity: int) -> Ending:
    """Whether the output's last token ends it. `capacity`: tokens the pool holds of a sequence."""
    params = request.params
    token, count = output.tokens[-1], len(output.tokens)
    total = request.prompt_length + count
    if count >= params.min_tokens:
        if token in config.eos_token_ids and not params.ignore_eos:
            return Ending("stop")
        if token in params.stop_token_ids:
            return Ending("stop", token)
    if params.max_tokens is not None and count >= params.max_tokens:
        return Ending("length")
    if total >= config.max_model_len:
        return Ending("length")
    if total > capacity:
        return Ending(
            "length",
            error=f"cut short at {total} tokens: a sequence holds at most {capacity} in this pool; "
            "make the pool larger",
        )
    return GOES_ON
