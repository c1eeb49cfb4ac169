"""What form the text of an answer must have: `response_format`, and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pagedkv.scheduling.structured import MAX_CHOICES, StructuredOutputs
from pagedkv.server.openai.body import Body
from pagedkv.server.openai.errors import FieldError

Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class SchemaFormat(Body):
    """`strict` changes nothing: the answer always has the form."""

    name: Name
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class Structured(Body):
    """The fields of StructuredOutputs."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_CHOICES, fail_fast=True)] | None = None
    grammar: str | None = None


def wanted_form(
    response: ResponseFormat | None, structured: Structured | None
) -> StructuredOutputs | None:
    """What the answer's text must be; None: anything. FieldError, RequestError."""
    if structured is not None:
        if response is not None and response.type != "text":
            raise FieldError(
                "response_format does not go with structured_outputs", "response_format"
            )
        return StructuredOutputs(
            json=structured.json_,
            json_object=structured.json_object or False,
            regex=structured.regex,
            choice=structured.choice,
            grammar=structured.grammar,
        )
    if response is None or response.type == "text":
        return None
    if response.type == "json_object":
        return StructuredOutputs(json_object=True)
    if response.json_schema is None:
        raise FieldError("response_format needs json_schema with its type", "response_format")
    schema = response.json_schema.schema_
    if schema is None:
        return StructuredOutputs(json_object=True)
    return StructuredOutputs(json=schema)
