"""From the fields of a body to what the engine is asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pagedkv.engine.requests import Prepared, PromptDict, RequestReader
from pagedkv.scheduling.params import MAX_LOGIT_BIAS, BeamSearchParams, SamplingParams
from pagedkv.server.openai.errors import FieldError
from pagedkv.server.openai.forms import wanted_form
from pagedkv.server.openai.protocol import Generation
from pagedkv.server.settings import SloClass

# Fields that are fields of SamplingParams, with the same meaning.
_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)
# Of these, and logprobs and logit_bias, beams know only some.
_OF_BEAMS = {"n", "temperature", "ignore_eos", "skip_special_tokens", "seed"}
_TOKEN = re.compile(r"[0-9]{1,10}")

Params = SamplingParams | BeamSearchParams


def sampling(
    body: Generation,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> Params:
    """How to draw the tokens. max_tokens None: as many as there is room for.

    FieldError, RequestError: a field is out of its bounds, or does not go with another.
    """
    if body.length_penalty is not None and not body.use_beam_search:
        raise FieldError("length_penalty needs use_beam_search=true", "length_penalty")
    if body.spaces_between_special_tokens is False:
        message = "spaces_between_special_tokens=false is not implemented: leave it out"
        raise FieldError(message, "spaces_between_special_tokens")
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    given["prompt_logprobs"] = body.prompt_logprobs if prompt_logprobs is None else prompt_logprobs
    given |= {"logprobs": logprobs, "logit_bias": _biases(body.logit_bias)}
    given["structured_outputs"] = wanted_form(body.response_format, body.structured_outputs)
    given = {name: value for name, value in given.items() if value is not None}
    if body.use_beam_search:
        return _beams(body, given, max_tokens)
    return SamplingParams(max_tokens=max_tokens, **given)


def _beams(body: Generation, given: Mapping[str, Any], max_tokens: int | None) -> BeamSearchParams:
    for name in given:
        if name not in _OF_BEAMS:
            raise FieldError(f"{name} is not implemented for beam search: leave it out", name)
    if max_tokens is None:
        raise FieldError("beam search needs max_tokens", "max_tokens")
    return BeamSearchParams(
        beam_width=given.get("n", 1),
        max_tokens=max_tokens,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        temperature=given.get("temperature", 0.0),
        ignore_eos=given.get("ignore_eos", False),
    )


def _biases(value: object) -> dict[int, float] | None:
    """JSON's keys are strings; the values are checked by SamplingParams."""
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise FieldError(
            f"logit_bias must be at most {MAX_LOGIT_BIAS} numbers by token id", "logit_bias"
        )
    for key in value:
        if not _TOKEN.fullmatch(key):
            raise FieldError(f"logit_bias has {key!r:.100} for a token id", "logit_bias")
    return {int(key): bias for key, bias in value.items()}


def most_tokens(body: Generation, max_model_len: int) -> int | None:
    """Of a prompt; None: what is too much of it is cut off."""
    return max_model_len if body.truncate_prompt_tokens is None else None


def prepare(
    reader: RequestReader,
    request_id: str,
    prompt: PromptDict,
    params: Params,
    body: Generation,
    *,
    max_model_len: int,
    arrival: float,
    tenant: str,
    slo: SloClass,
    timeout: float | None,
) -> Prepared:
    """A request that may be submitted; `prompt` has token ids.

    slo: what a body is promised that wishes for nothing itself. timeout: seconds that it may take
    if nobody says when it must end.
    """
    deadline = _seconds(_first(body.deadline_ms, slo.deadline_ms)) or timeout
    return reader.read(
        request_id,
        _truncated(prompt, params, body, max_model_len),
        params,
        arrival=arrival,
        priority=slo.priority if body.priority is None else body.priority,
        tenant=tenant,
        cache_salt=body.cache_salt,
        ttft_slo=_seconds(_first(body.ttft_slo_ms, slo.ttft_slo_ms)),
        tpot_slo=_seconds(_first(body.tpot_slo_ms, slo.tpot_slo_ms)),
        deadline=None if deadline is None else arrival + deadline,
    )


def _first(given: float | None, default: float | None) -> float | None:
    return default if given is None else given


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _truncated(
    prompt: PromptDict, params: Params, body: Generation, max_model_len: int
) -> PromptDict:
    """Its last tokens (its first with truncation_side "right"), as many as are asked for."""
    keep, ids = body.truncate_prompt_tokens, prompt["prompt_token_ids"]
    if keep is None:
        return prompt
    if keep == -1:
        keep = max(max_model_len - (params.max_tokens or 1), 1)
    if keep == 0:
        raise FieldError("truncate_prompt_tokens=0 leaves no prompt", "truncate_prompt_tokens")
    if len(ids) <= keep:
        return prompt
    return {"prompt_token_ids": ids[:keep] if body.truncation_side == "right" else ids[-keep:]}
