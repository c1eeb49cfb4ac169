"""What a user gets back, and how token deltas of the loop become it.

What users get are msgspec's structs: a step makes three for each row, and frozen dataclasses take
several times as long to make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from tokenizers import Tokenizer

from pagedkv.engine.detokenizer import Detokenizer, Detokenizers
from pagedkv.engine.stops import StopChecker
from pagedkv.scheduling.messages import Abort, Add, Delta, RequestUsage
from pagedkv.scheduling.step import TokenLogprobs


class Logprob(msgspec.Struct, frozen=True):
    """`rank` 1 is the most likely token. `decoded_token` is its text alone."""

    logprob: float
    rank: int
    decoded_token: str


class RequestMetrics(msgspec.Struct, frozen=True):
    """Times in seconds on the engine's clock; None while the event has not happened."""

    arrival_time: float
    admitted_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def queue_time(self) -> float | None:
        """From arrival until the request first left the waiting queue."""
        return None if self.admitted_time is None else self.admitted_time - self.arrival_time

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


class CompletionOutput(msgspec.Struct, frozen=True):
    """One sample so far. `token_ids` include the token that ended it, `text` does not.

    `finish_reason`: "stop", "length", "abort", "error" or "deadline" (it could not be finished in
    time), None while it runs. `stop_reason`: the stop string or stop token id that ended it.
    `error`: why it failed or was cut short; `error_type`: one of `messages.ERROR_TYPES` where
    something went wrong. `score`: of a beam search's hypothesis, see BeamSearchParams; `index` is
    its rank.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    score: float | None = None
    error_type: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct, frozen=True):
    """A request so far: always the whole text, not only what is new.

    `prompt` is None if token ids were given. `prompt_logprobs` has an entry for each prompt token,
    None for the first. `seed` reproduces the samples, also when the client gave none. `usage`: what
    the request has taken, once it has ended; None for one that was refused. For a dict of all of it
    call `msgspec.to_builtins`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    seed: int
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    usage: RequestUsage | None = None


class OutputProcessor:
    """Keeps the text of every live request, outside the loop.

    `abort` is called with the message that ends a sample when its stop string was found.
    `tokenizer` None: all text is empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, abort: Callable[[Abort], None]) -> None:
        self._tokenizer, self._abort = tokenizer, abort
        self._detokenizers = None if tokenizer is None else Detokenizers(tokenizer)
        self._requests: dict[str, _Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, add: Add, request_id: str, prompt: str | None) -> None:
        """Expect deltas of `add.request_id`; they are reported under the client's `request_id`."""
        samples = [
            _Sample(i, add, self._tokenizer, self._detokenizer(add)) for i in range(add.params.n)
        ]
        self._requests[add.request_id] = _Request(add, request_id, prompt, samples, len(samples))

    def _detokenizer(self, add: Add) -> Detokenizer | None:
        if self._detokenizers is None:
            return None
        return self._detokenizers.make(skip_special_tokens=add.params.skip_special_tokens)

    def discard(self, core_id: str) -> None:
        """Report nothing more of a request."""
        self._requests.pop(core_id, None)

    def process(self, deltas: Sequence[Delta], now: float) -> list[RequestOutput]:
        """One RequestOutput for each request that changed, in the order of its first delta.

        Deltas of a request or sample that is finished already are ignored, but for what the whole
        request has taken: one that ends by a stop string is finished when the loop says so.
        """
        changed: dict[str, _Request] = {}
        for delta in deltas:
            request = self._requests.get(delta.request_id)
            if request is None:
                continue
            sample = request.samples[delta.sample]
            request.usage = delta.usage
            if sample.finish_reason is None:
                request.take(delta, now, self._tokenizer)
                if sample.finish_reason == "stop" and delta.finish_reason is None:
                    request.stopped = True
                    self._abort(Abort(delta.request_id, delta.sample, reason="stop"))
            elif delta.usage is None:
                continue
            changed[delta.request_id] = request
        outputs = []
        for core_id, request in changed.items():
            if request.finished:
                del self._requests[core_id]
            outputs.append(request.output())
        return outputs


@dataclass(slots=True, eq=False)
class _Request:
    add: Add
    request_id: str
    prompt: str | None
    samples: list[_Sample]
    num_open: int  # samples that have not ended
    num_cached_tokens: int = 0
    admitted_time: float | None = None
    prompt_scores: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    first_token_time: float | None = None
    finished_time: float | None = None
    usage: RequestUsage | None = None
    stopped: bool = False  # a sample met its stop string, and the loop has been told

    @property
    def complete(self) -> bool:
        """Whether all samples have ended."""
        return self.num_open == 0

    @property
    def finished(self) -> bool:
        return self.complete and (self.usage is not None or not self.stopped)

    def take(self, delta: Delta, now: float, tokenizer: Tokenizer | None) -> None:
        """A delta of a sample that has not ended."""
        if self.first_token_time is None and delta.token_ids:
            self.first_token_time = now
        if delta.num_cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = delta.num_cached_tokens
        self.admitted_time = delta.admitted_at
        if delta.prompt_logprobs:
            self.prompt_scores += [_alternatives(s, tokenizer) for s in delta.prompt_logprobs]
        sample = self.samples[delta.sample]
        sample.take(delta)
        if sample.finish_reason is not None:
            self.num_open -= 1
            if self.complete:
                self.finished_time = now

    def output(self) -> RequestOutput:
        scores = None
        if self.add.params.prompt_logprobs is not None:
            scores = tuple(self.prompt_scores)
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.add.prompt,
            tuple([sample.output() for sample in self.samples]),
            self.finished,
            self.num_cached_tokens,
            RequestMetrics(
                self.add.arrival, self.admitted_time, self.first_token_time, self.finished_time
            ),
            self.add.seed,
            scores,
            self.usage,
        )


class _Sample:
    """Text and tokens of one sample."""

    def __init__(
        self, index: int, add: Add, tokenizer: Tokenizer | None, detokenizer: Detokenizer | None
    ) -> None:
        params = add.params
        self._index, self._params, self._tokenizer = index, params, tokenizer
        self._detokenizer = detokenizer
        self._stops = StopChecker(params.stop, params.include_stop_str_in_output)
        self._text = ""
        self._tokens: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._total = 0.0  # of the tokens' log-probabilities
        self._stop_reason: int | str | None = None
        self._error: str | None = None
        self._error_type: str | None = None
        self._score: float | None = None
        self.finish_reason: str | None = None

    def take(self, delta: Delta) -> None:
        """The delta's tokens, up to the one that completes a stop string."""
        if delta.finish_reason is not None:
            self._error, self._score = delta.error, delta.score
            self._error_type = delta.error_type
        last = len(delta.token_ids) - 1
        for i, token in enumerate(delta.token_ids):
            self._tokens.append(token)
            if i < len(delta.logprobs) and (scored := delta.logprobs[i]) is not None:
                self._logprobs.append(_alternatives(scored, self._tokenizer))
                self._total += float(scored.values[0])
            # The token that ended the sample is no text, as its stop string would not be.
            ends = i == last and delta.finish_reason == "stop" and not delta.complete
            if not ends or self._params.include_stop_str_in_output:
                self._show(self._detokenizer.push(token) if self._detokenizer else "")
            if self.finish_reason is not None:
                return
        if delta.finish_reason is not None:
            self._show(self._detokenizer.finish() if self._detokenizer else "")
            if self.finish_reason is None:
                self._text += self._stops.finish()
                self.finish_reason, self._stop_reason = delta.finish_reason, delta.stop_reason

    def _show(self, text: str) -> None:
        if not self._params.stop:
            self._text += text
            return
        armed = len(self._tokens) > self._params.min_tokens
        result = self._stops.push(text, armed=armed)
        self._text += result.text
        if result.stop is not None:
            self.finish_reason, self._stop_reason = "stop", result.stop

    def output(self) -> CompletionOutput:
        scored = self._params.logprobs is not None
        return CompletionOutput(
            self._index,
            self._text,
            tuple(self._tokens),
            tuple(self._logprobs) if scored else None,
            self._total if scored else None,
            self.finish_reason,
            self._stop_reason,
            self._error,
            self._score,
            self._error_type,
        )


def _alternatives(scored: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """By token id, the token itself first."""
    ids, values = scored.ids.tolist(), scored.values.tolist()
    entries: dict[int, Logprob] = {}
    for rank, (token, value) in enumerate(zip(ids, values, strict=True)):
        text = tokenizer.decode([token], skip_special_tokens=False) if tokenizer else ""
        entries.setdefault(token, Logprob(value, rank or scored.rank, text))
    return entries
