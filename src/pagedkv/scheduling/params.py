"""What a client may ask for: `SamplingParams` or `BeamSearchParams`.

Both are validated before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedkv.errors import RequestError
from pagedkv.scheduling.structured import StructuredOutputs

MAX_STOPS = 64
MAX_STOP_CHARS = 1000
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 64
MAX_N = 256
MAX_LENGTH_PENALTY = 10.0


def _fail(name: str, value: object, want: str) -> RequestError:
    return RequestError(f"{name}={value!r:.200} is not valid: {want}")


def _bounded(name: str, values: object, most: int) -> tuple[Any, ...]:
    """A list of at most `most` values as a tuple; nothing for None."""
    if values is None:
        return ()
    if isinstance(values, (str, bytes, bytearray)) or not isinstance(values, Sequence):
        raise _fail(name, values, f"a list of at most {most}")
    if len(values) > most:
        raise RequestError(f"{name} holds {len(values)} values: give at most {most}")
    return tuple(values)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw the tokens of one request. Names and defaults as vLLM users know them.

    temperature 0 is greedy. `top_k` 0 or -1 and `top_p` 1.0 switch those filters off.
    `stop` is a string or a list of strings. `seed` None: one is drawn at arrival.
    `logprobs` / `prompt_logprobs`: how many alternatives to report beside the token itself.
    `structured_outputs`: the form that the output must have. The model's end token may be drawn
    where the form is complete, and nowhere else. An output ends with "stop" once nothing may
    follow, even before `min_tokens` and with `ignore_eos`; until then both forbid the end token
    where the form would allow it. `stop_token_ids` end an output where the form allows them. One
    that is cut short, by `max_tokens` or a stop string, need not have the form.
    Raises RequestError naming the field and its value.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _bounded("stop", stop, MAX_STOPS))
        ids = _bounded("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        object.__setattr__(self, "stop_token_ids", ids)
        biases = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(biases, Mapping) or len(biases) > MAX_LOGIT_BIAS:
            raise _fail("logit_bias", biases, f"at most {MAX_LOGIT_BIAS} numbers by token id")
        object.__setattr__(self, "logit_bias", dict(biases))
        self._check_flags()
        self._check_integers()
        self._check_numbers()
        self._check_collections()
        form = self.structured_outputs
        if form is not None and not isinstance(form, StructuredOutputs):
            raise _fail("structured_outputs", form, "StructuredOutputs")

    def _check_flags(self) -> None:
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise _fail(name, value, "True or False")

    def _check_integers(self) -> None:
        bounds: tuple[tuple[str, int, int], ...] = (
            ("n", 1, MAX_N),
            ("top_k", -1, 2**31 - 1),
            ("min_tokens", 0, 2**31 - 1),
            ("max_tokens", 1, 2**31 - 1),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
            ("seed", -(2**63), 2**63 - 1),
        )
        optional = {"max_tokens", "logprobs", "prompt_logprobs", "seed"}
        for name, low, high in bounds:
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise _fail(name, value, f"an integer from {low} to {high}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _fail("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")

    def _check_numbers(self) -> None:
        bounds: tuple[tuple[str, float, float, bool], ...] = (
            ("temperature", 0.0, 100.0, True),
            ("top_p", 0.0, 1.0, False),
            ("min_p", 0.0, 1.0, True),
            ("presence_penalty", -2.0, 2.0, True),
            ("frequency_penalty", -2.0, 2.0, True),
            ("repetition_penalty", 0.01, 100.0, True),
        )
        for name, low, high, closed in bounds:
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not (low <= value <= high) or (value == low and not closed):
                edge = "[" if closed else "("
                raise _fail(name, value, f"a number in {edge}{low}, {high}]")

    def _check_collections(self) -> None:
        for stop in self.stop:
            if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
                raise _fail("stop", stop, f"strings of 1 to {MAX_STOP_CHARS} characters")
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(self, name):
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
                    raise _fail(name, token, "token ids from 0 to the vocabulary size - 1")
        for token, bias in self.logit_bias.items():
            number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
            if not number or not -100 <= bias <= 100:
                raise _fail("logit_bias", {token: bias}, "finite numbers in [-100, 100]")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Search for the most likely outputs of one request, as transformers' `num_beams` does.

    beam_width: beams that run at once, and outputs reported. A hypothesis scores the sum of its
    log-probabilities / (number of tokens ** length_penalty), its end token included.
    early_stopping: end once beam_width hypotheses are finished; otherwise once the best beam would
    not improve them if it ended now. Nothing is drawn, so `temperature` can only be 0.
    Raises RequestError naming the field and its value.
    """

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool = False
    temperature: float = 0.0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, high in (("beam_width", MAX_N), ("max_tokens", 2**31 - 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
                raise _fail(name, value, f"an integer from 1 to {high}")
        for name in ("early_stopping", "ignore_eos"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise _fail(name, value, "True or False")
        for name, most in (("length_penalty", MAX_LENGTH_PENALTY), ("temperature", 0.0)):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not -most <= value <= most:
                want = f"a number in [-{most}, {most}]" if most else "0, beam search draws nothing"
                raise _fail(name, value, want)

    @property
    def sampling(self) -> SamplingParams:
        """The part that beams have in common with the samples of any request."""
        return SamplingParams(
            n=self.beam_width,
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
        )
