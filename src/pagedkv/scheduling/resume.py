"""A request that leaves with what it has drawn, and one that enters with it.

Sampling is stateless: the next token of a sample is a function of the prompt, its own tokens and
the request's parameters. So these are all that a request takes along, with its clocks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pagedkv.errors import RequestError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import FINISH_REASONS, Add, Drawn, Resume
from pagedkv.scheduling.request import Output, Request
from pagedkv.scheduling.usage import usage_of


def on_clock_of(resume: Resume, now: float) -> Resume:
    """With its times on the clock that shows `now`, to which they belong from here on."""
    if resume.sent_at is None:
        return resume
    shift = now - resume.sent_at

    def moved(time: float | None) -> float | None:
        return None if time is None else time + shift

    add = resume.add
    return replace(
        resume,
        add=replace(add, arrival=add.arrival + shift, deadline=moved(add.deadline)),
        sent_at=None,
        admitted_at=moved(resume.admitted_at),
        first_token_at=moved(resume.first_token_at),
        last_token_at=moved(resume.last_token_at),
    )


def check_resume(resume: Resume, config: SchedulerConfig) -> None:
    """RequestError if nobody can have drawn these tokens for the request, which is valid itself."""
    add, outputs = resume.add, resume.outputs
    if len(outputs) != add.params.n:
        raise RequestError(
            f"{len(outputs)} outputs came with {add.request_id!r}, which has {add.params.n}"
        )
    live = [output for output in outputs if output.finish_reason is None]
    if not live:
        raise RequestError(f"all outputs of {add.request_id!r} have ended: nothing goes on")
    for output in outputs:
        if output.finish_reason not in (None, *FINISH_REASONS):
            raise RequestError(f"finish_reason={output.finish_reason!r:.100} is none")
        tokens = np.asarray(output.tokens, np.int64)
        if ((tokens < 0) | (tokens >= (config.vocab_size or 2**31))).any():
            raise RequestError(f"{add.request_id!r} has drawn a token outside the vocabulary")
    drew = [bool(output.tokens) for output in live]
    if any(drew) != all(drew):
        raise RequestError(
            f"outputs {[i for i, there in enumerate(drew) if not there]} of those of "
            f"{add.request_id!r} that go on have drawn nothing: they all draw first in one step"
        )


def restore(request: Request, resume: Resume, now: float) -> None:
    """Gives a request, new here, what it came with. Times are on the clock of `now`."""
    for output, drawn in zip(request.outputs, resume.outputs, strict=True):
        output.tokens, output.logprob = list(drawn.tokens), drawn.logprob
        output.finish_reason = drawn.finish_reason
        if drawn.tokens:  # the last of them was never computed
            output.computed = request.prompt_length + len(drawn.tokens) - 1
    if request.search is not None:
        request.search.finished[:] = resume.finished
    usage = resume.usage
    request.num_cached_tokens, request.blocks_peak = usage.cached_tokens, usage.blocks_peak
    request.num_preemptions, request.swapped_blocks = usage.preemptions, usage.swapped_blocks
    request.recomputed_tokens = usage.recomputed_tokens
    request.num_scored = resume.num_scored
    request.started = any(output.tokens for output in request.live)
    if request.started:
        request.admitted = request.resumed = True
        request.num_prefilled = request.prompt_length
        request.admitted_at = resume.admitted_at
        first = now if resume.first_token_at is None else resume.first_token_at
        request.first_token_at = request.first_token_end = first
        request.last_token_end = first if resume.last_token_at is None else resume.last_token_at


def resumable(request: Request, now: float) -> Resume:
    """What takes the request elsewhere, as it is at `now` on this clock."""
    return Resume(
        add=original(request),
        outputs=tuple(map(_drawn, request.outputs)),
        finished=() if request.search is None else tuple(request.search.finished),
        sent_at=now,
        admitted_at=request.admitted_at,
        first_token_at=request.first_token_at,
        last_token_at=request.last_token_end if request.started else None,
        num_scored=request.num_scored,
        usage=usage_of(request),
    )


def original(request: Request) -> Add:
    """The message with which the request came."""
    return replace(request.add, prompt=tuple(request.prompt.tolist()))


def _drawn(output: Output) -> Drawn:
    return Drawn(tuple(output.tokens), output.finish_reason, output.logprob)
