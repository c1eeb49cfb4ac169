"""What a body may hold, and reading one. Names as users of OpenAI and vLLM know them.

Every field may be null, which is the same as leaving it out; what it is then, the engine decides.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias, TypeVar

from fastapi import Request
from pydantic import Field, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails, from_json

from pagedkv.errors import RequestError
from pagedkv.scheduling.params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)
from pagedkv.scheduling.validate import MAX_PRIORITY
from pagedkv.server.openai.body import Body
from pagedkv.server.openai.errors import FieldError
from pagedkv.server.openai.forms import ResponseFormat, Structured

MAX_SALT_CHARS = 1024
MAX_ID_CHARS = 128
# Milliseconds that an objective or a deadline may be away: about a year.
MAX_MS = 3.2e10

# Bodies below this size are parsed at once: that takes less time than waking a thread.
_SMALL = 16 * 1024

Whole = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Strings = Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)]
Tokens = Annotated[list[Count], Field(fail_fast=True)]
Stop = str | Strings | None
Milliseconds = Annotated[float, Field(gt=0, le=MAX_MS)]
RequestId = Annotated[str, Field(pattern=rf"^[!-~]{{1,{MAX_ID_CHARS}}}$")]
Biases = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                    "maxProperties": MAX_LOGIT_BIAS,
                },
                {"type": "null"},
            ]
        }
    ),
]
# What would change the answer and is not implemented: only null will do.
Refused: TypeAlias = None


class StreamOptions(Body):
    """include_usage: one more chunk with the counts. continuous_usage_stats: in all chunks."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Any = None  # ignored: nothing is added to chunks


class Accepted(Body):
    """What OpenAI's clients may send and what changes nothing here."""

    user: Any = None
    safety_identifier: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    session_id: Any = None


class Generation(Accepted):
    """What completions and chats have in common."""

    model: str | None = None
    # Drawing tokens: as in SamplingParams.
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Biases = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    # Ending.
    max_tokens: Whole | None = None
    min_tokens: Count | None = None
    stop: Stop = None
    stop_token_ids: Annotated[Tokens, Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    # Beam search: `n` beams.
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    # What is reported.
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # The prompt.
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    truncation_side: Annotated[str, Field(pattern="^(left|right)$")] | None = None
    # How it is served.
    request_id: RequestId | None = None
    ttft_slo_ms: Milliseconds | None = None
    tpot_slo_ms: Milliseconds | None = None
    deadline_ms: Milliseconds | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    # The form of the text.
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    # Not implemented.
    allowed_token_ids: Refused = None
    bad_words: Refused = None
    logprob_token_ids: Refused = None
    kv_transfer_params: Refused = None
    vllm_xargs: Refused = None


B = TypeVar("B", bound=Body)

# Fields that vLLM had before structured_outputs, and what is inside that in their place.
_RENAMED = MappingProxyType(
    {f"guided_{form}": form for form in ("json", "regex", "choice", "grammar")}
)


async def read_body(request: Request, kind: type[B]) -> B:
    """The body of a request. RequestError says what is wrong with it."""
    media = request.headers.get("content-type", "application/json").split(";")[0].strip()
    if media != "application/json":
        raise RequestError(f"the content type is {media!r:.100}: send application/json")
    raw = await request.body()
    if len(raw) < _SMALL:
        return parse(raw, kind)
    return await asyncio.to_thread(parse, raw, kind)


def parse(raw: bytes, kind: type[B]) -> B:
    """RequestError: it is no JSON, or it has a field that is wrong, unknown or not implemented."""
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    for name in value:  # at the first: a body may hold very many
        if name not in kind.model_fields:
            raise FieldError(_unknown(name, kind), name[:MAX_ID_CHARS])
    return checked(value, kind)


def checked(value: Mapping[str, Any], kind: type[B]) -> B:
    """The fields as a body. FieldError: one is wrong or not implemented."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
    where = str(errors[0]["loc"][0])
    wrong = [e for e in errors if e["loc"][0] == where][-1]  # of the last form that it may have
    if wrong["type"] == "none_required":
        raise FieldError(f"{where} is not implemented: leave it out", where)
    raise FieldError(f"{_place(wrong, value):.200}: {wrong['msg']}", where)


def _place(wrong: ErrorDetails, value: Any) -> str:
    """Where an error is, less the forms of a union, which pydantic names too; what is too large."""
    place = []
    for part in wrong["loc"]:
        inside = isinstance(value, list) if isinstance(part, int) else isinstance(value, Mapping)
        if inside and (isinstance(part, int) or part in value):
            value = value[part]
            place.append(str(part))
    if wrong["type"] == "missing":
        place.append(str(wrong["loc"][-1]))
    elif wrong["type"].startswith(("greater", "less")):
        return f"{'.'.join(place)}={value!r:.100}"
    return ".".join(place)


def _unknown(name: str, kind: type[Body]) -> str:
    if name in _RENAMED and "structured_outputs" in kind.model_fields:
        return f"there is no field {name!r}: use structured_outputs={{{_RENAMED[name]!r}: ...}}"
    near = difflib.get_close_matches(name[:MAX_ID_CHARS], kind.model_fields, 1)
    hint = f": is it {near[0]!r}?" if near else ""
    return f"there is no field {name!r:.100}{hint}"


def described(kind: type[Body]) -> dict[str, Any]:
    """What an OpenAPI document says of a route that reads such a body."""
    schema = kind.model_json_schema()
    content = {"application/json": {"schema": _inlined(schema, schema.pop("$defs", {}))}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with what it refers to in place."""
    if isinstance(schema, list):
        return [_inlined(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}
