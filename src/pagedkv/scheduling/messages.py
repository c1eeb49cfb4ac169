"""What goes into the engine loop and what comes out of it. Plain, serialisable values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pagedkv.scheduling.params import BeamSearchParams, SamplingParams
from pagedkv.scheduling.step import TokenLogprobs

FINISH_REASONS = ("stop", "length", "abort", "error", "deadline")
# Why a sample ended with an error. "invalid": the request can never run as given. "overload": there
# is no room for it, or its first token could not come in time. "draining": nothing more is taken.
# "deadline": it passed. "engine": computing it failed, alone or with its whole step.
ERROR_TYPES = ("invalid", "overload", "draining", "deadline", "engine")


@dataclass(frozen=True, slots=True)
class Add:
    """A request enters. `seed` is always given: the front end draws one when the client did not.

    `arrival` in seconds and `priority` (lower numbers first, from -1000 to 1000) say who is served
    first under policies that look at them. Requests share K/V when `tenant`
    and `cache_salt` are equal. `tenant` comes from the operator, never from the client; the salt is
    the client's, and only narrows sharing inside its tenant.
    `beam`: search instead of drawing; `params` is then `beam.sampling`.
    `ttft_slo`, `tpot_slo`: the first token is wanted so many seconds after `arrival`, each further
    one so many after the one before. `deadline`: on the clock of `arrival`; the request is worth
    nothing after it and ends with reason "deadline".
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: float
    seed: int
    priority: int = 0
    tenant: str | None = None
    beam: BeamSearchParams | None = None
    cache_salt: str | None = None
    ttft_slo: float | None = None
    tpot_slo: float | None = None
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends a request (`sample` None) or one of its samples. Unknown ids are ignored.

    Beams end together.

    `reason` is the finish reason to report: "abort", or "stop" when a stop string was found.
    """

    request_id: str
    sample: int | None = None
    reason: str = "abort"


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what is there, accept nothing more."""


class RequestUsage(NamedTuple):
    """What a request has taken, all its samples together.

    cached_tokens: prompt tokens that it did not compute, for the device or a tier below had them
    when it first started. blocks_peak: most distinct blocks that its sequences had at once.
    preemptions: how often its blocks were taken for others. After these, swapped_blocks: blocks
    brought back from below the device; recomputed_tokens: tokens computed although their K/V had
    been there.
    """

    cached_tokens: int = 0
    blocks_peak: int = 0
    preemptions: int = 0
    swapped_blocks: int = 0
    recomputed_tokens: int = 0


NOTHING_USED = RequestUsage()


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A sequence of a beam search that is not extended any more.

    score: the sum of its tokens' log-probabilities / (number of tokens ** length_penalty).
    """

    tokens: tuple[int, ...]
    score: float
    finish_reason: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one sample of a request has drawn, or one of its running beams.

    finish_reason: None if it goes on. logprob: sum of a beam's log-probabilities.
    """

    tokens: tuple[int, ...] = ()
    finish_reason: str | None = None
    logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class Resume:
    """A request enters with tokens that it has drawn elsewhere, and goes on behind them.

    It was moved, or the worker that had it has died; the tokens that follow are those that would
    have followed there. It waits like one that was preempted if it has drawn anything, else like a
    new one; it is never refused because others wait. What it has reported is not reported again.

    outputs: of its samples, in order; all that go on have drawn their first token, or none has. Of
    a beam search, the running beams, best first; nothing drawn starts it anew. finished: the
    hypotheses of a search so far.
    sent_at: what the clock of all times in this showed when it was sent. The receiver moves them to
    its own clock, as if it had come at once: hosts have different ones. None: it is the receiver's.
    num_scored: prompt log-probabilities that were reported. usage: what it has taken so far.
    """

    add: Add
    outputs: tuple[Drawn, ...]
    finished: tuple[Hypothesis, ...] = ()
    sent_at: float | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_scored: int = 0
    usage: RequestUsage = NOTHING_USED

    @property
    def request_id(self) -> str:
        return self.add.request_id


Message = Add | Abort | Drain | Resume


class Delta(NamedTuple):
    """New tokens of one sample of a request, or its end (`finish_reason`), or both.

    `stop_reason` is the token id that ended it when that was not the model's own end token.
    `error` says what went wrong (finish reason "error", "deadline") or why it was cut short;
    `error_type` is one of ERROR_TYPES where something went wrong, None else.
    `usage` comes with the last delta of a request that was taken in.
    A beam search reports nothing before its end: then sample i is its i-th best hypothesis, and
    `score` says how good that is (see BeamSearchParams).
    """

    request_id: str
    sample: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    score: float | None = None
    num_cached_tokens: int = 0
    admitted_at: float | None = None  # when the request first left the waiting queue
    complete: bool = False  # its form ended the sample: the last token is text like the others
    error_type: str | None = None
    usage: RequestUsage | None = None


@dataclass(frozen=True, slots=True)
class StepStats:
    """Numbers of one step, for metrics and progress displays."""

    step: int
    now: float
    duration: float
    num_running: int
    num_waiting: int
    num_tokens: int
    num_preempted: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    # While the step ran; all other figures are those after it.
    blocks_peak: int  # held
    blocks_unshared: int  # the same samples' blocks if none were shared
    slots_filled: int  # of those blocks, with the step's tokens; shared blocks counted once
    slots_unshared: int  # tokens of all samples, those in shared blocks for each of them
    slots_reserved: int  # what reserving max_model_len for every sample would take
    shared_spans: int  # spans of K/V read once for several rows, see Result
    # Seconds of the loop's clock, 0.0 without one.
    schedule_seconds: float = 0.0  # applying messages, planning, laying the step out
    execute_seconds: float = 0.0  # copies, transfers, the forward pass
    sample_seconds: float = 0.0  # drawing tokens
    deliver_seconds: float = 0.0  # committing what was computed, making deltas
