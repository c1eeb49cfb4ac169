"""Tools: what a chat may call, and what an answer calls.

Calls are written as models of the Hermes family write them (NousResearch/Hermes-Function-Calling;
the chat templates of Qwen 2.5 and 3 as well):

    <tool_call>
    {"name": "lookup", "arguments": {"city": "Paris"}}
    </tool_call>
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from pagedkv.engine.grammar import JSON_OPTIONS
from pagedkv.scheduling.structured import StructuredOutputs
from pagedkv.server.openai.body import Body
from pagedkv.server.openai.errors import FieldError
from pagedkv.server.openai.forms import Name

MAX_TOOLS = 128
_NOTHING = MappingProxyType({"properties": {}, "additionalProperties": False})
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([\w-]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')


class Function(Body):
    """`strict` changes nothing: arguments have their form wherever a call is demanded."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class Named(Body):
    name: str


class ToolNamed(Body):
    type: Literal["function"]
    function: Named


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | ToolNamed


class ToolCall(NamedTuple):
    """A call as far as it is written; `arguments`: JSON text, maybe only its beginning."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may call.

    demanded: it is nothing but calls. named: it is one call of the only tool there is.
    parallel: there may be several calls.
    """

    functions: tuple[Function, ...]
    demanded: bool
    named: bool
    parallel: bool

    @property
    def form(self) -> StructuredOutputs | None:
        """What the answer must be, where calls are demanded. FieldError."""
        if not self.demanded:
            return None
        more = r' ("\n" call)*' if self.parallel and not self.named else ""
        each = " | ".join(f"f{i}" for i in range(len(self.functions)))
        rules = [rf"start: call{more}", rf'call: "{_OPEN}\n" ({each}) "\n{_CLOSE}"']
        for i, function in enumerate(self.functions):
            head = json.dumps(f'{{"name": {json.dumps(function.name)}, "arguments": ')
            schema = json.dumps({**_schema(function), "x-guidance": JSON_OPTIONS})
            rules += [f'f{i}: {head} a{i} "}}"', f"a{i}: %json {schema}"]
        return StructuredOutputs(grammar="\n".join(rules))

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """As chat templates want them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": function.name,
                    "description": function.description or "",
                    "parameters": _schema(function),
                },
            }
            for function in self.functions
        ]

    def read(self, text: str, ended: bool) -> tuple[str, list[ToolCall]]:
        """The text beside the calls, and the calls, of an answer so far.

        Of a longer text both are longer or the same. ended: nothing will follow; until then what
        may become a call is held back. What is no call of one of the tools is text.
        """
        names = {function.name for function in self.functions}
        beside, calls, at = "", list[ToolCall](), 0
        while not calls or self.parallel:
            begin = text.find(_OPEN, at)
            if begin < 0:
                beside += text[at:] if ended else text[at : len(text) - _begun(text)]
                break
            beside += text[at:begin]
            found = _read_call(text, begin + len(_OPEN))
            if found is None:
                beside += text[begin:] if ended else ""
                break
            call, at = found
            if call is None or call.name not in names:
                beside += _OPEN
                at = begin + len(_OPEN)
            else:
                calls.append(call)
        return (beside if ended and not calls else beside.rstrip()), calls

    def reason(self, finish_reason: str | None, calls: Sequence[object]) -> str | None:
        """OpenAI's finish reason."""
        ends = finish_reason == "stop" and calls and not self.named
        return "tool_calls" if ends else finish_reason

    def message(self, text: str) -> dict[str, Any]:
        """The content and the calls of a whole answer."""
        beside, calls = self.read(text, ended=True)
        if not calls:
            return {"content": beside}
        written = [
            {
                "id": new_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
        return {"content": beside or None, "tool_calls": written}


def new_calls(calls: Sequence[ToolCall], sent: list[int]) -> list[dict[str, Any]]:
    """What is new of the calls. `sent`, characters of each, is brought up to date."""
    written: list[dict[str, Any]] = []
    for i, call in enumerate(calls):
        if i == len(sent):
            function = {"name": call.name, "arguments": call.arguments}
            written.append({"index": i, "id": new_id(), "type": "function", "function": function})
            sent.append(len(call.arguments))
        elif new := call.arguments[sent[i] :]:
            written.append({"index": i, "function": {"arguments": new}})
            sent[i] = len(call.arguments)
    return written


def new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def tool_use(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None
) -> ToolUse | None:
    """What is asked for; None: no tools. FieldError: the fields contradict each other."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise FieldError("tool_choice needs tools", "tool_choice")
        return None
    functions = tuple(tool.function for tool in tools)
    if len({function.name for function in functions}) < len(functions):
        raise FieldError("two tools have the same name", "tools")
    if choice == "none":
        return None
    named = isinstance(choice, ToolNamed)
    if isinstance(choice, ToolNamed):
        name = choice.function.name
        functions = tuple(function for function in functions if function.name == name)
        if not functions:
            raise FieldError(f"tool_choice: there is no tool {name!r:.100}", "tool_choice")
    demanded = named or choice == "required"
    return ToolUse(functions, demanded, named, parallel is not False)


def chat_messages(
    messages: Sequence[dict[str, Any]], use: ToolUse | None, known: bool
) -> list[dict[str, Any]]:
    """The conversation as its template wants it: earlier calls with their arguments as objects.

    known: the template writes tools and calls. If not, they become text, and the tools are
    described in the system message. FieldError: a call is none.
    """
    found = [_with_calls(message) for message in messages]
    if known:
        return found
    found = [_as_text(message) for message in found]
    if use is not None:
        told, first = _described(use), found[0]
        if first.get("role") == "system" and isinstance(first.get("content"), str):
            told = f"{first['content']}\n\n{told}"
            found = found[1:]
        found = [{"role": "system", "content": told}, *found]
    return found


def _schema(function: Function) -> dict[str, Any]:
    """Of the arguments, which are an object."""
    schema = {"type": "object", **(function.parameters or _NOTHING)}
    if schema["type"] != "object":
        raise FieldError(f"tools: the parameters of {function.name!r} are no object", "tools")
    return schema


def _begun(text: str) -> int:
    """Characters at the end that may be the beginning of a call."""
    most = min(len(text), len(_OPEN) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(_OPEN[:n])), 0)


def _read_call(text: str, at: int) -> tuple[ToolCall | None, int] | None:
    """The call whose object begins at `at`, None if it is none, and where the text goes on.

    None: that is not known yet. What is said of a text is said of every longer one.
    """
    head = _HEAD.match(text, at)
    if head is not None:
        end = _object_end(text, head.end())
        close = text.find(_CLOSE, end)
        after = len(text) if close < 0 else close + len(_CLOSE)
        return ToolCall(head[1], text[head.end() : end]), after
    close = text.find(_CLOSE, at)
    if close < 0:
        return None
    try:
        value = json.loads(text[at:close])
    except (ValueError, RecursionError):
        return None, close
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None, close
    return ToolCall(value["name"], json.dumps(value.get("arguments", {}))), close + len(_CLOSE)


_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\]]', re.DOTALL)


def _object_end(text: str, begin: int) -> int:
    """Where the JSON object that begins at `begin` ends: the end of the text if it does not."""
    depth = 0
    for piece in _PIECE.finditer(text, begin):
        if piece[0] in "{[":
            depth += 1
        elif piece[0] in "}]":
            depth -= 1
            if depth == 0:
                return piece.end()
    return len(text)


def _with_calls(message: dict[str, Any]) -> dict[str, Any]:
    """A message of the assistant's that calls tools, for a template."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, list):
        raise FieldError("messages: tool_calls must be a list", "messages")
    written = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise FieldError(f"messages: {call!r:.100} is no call of a function", "messages")
        arguments = function.get("arguments") or "{}"
        try:
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise FieldError(f"messages: arguments are no JSON: {error}", "messages") from None
        written.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "content": message.get("content") or "", "tool_calls": written}


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Calls and their results as Hermes writes them, for a template that knows neither."""
    if message.get("role") == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message.get('content')}\n</tool_response>",
        }
    calls = message.get("tool_calls")
    if not calls:
        return message
    text = [message["content"]] if message["content"] else []
    for call in calls:
        one = {name: call["function"][name] for name in ("name", "arguments")}
        text.append(f"{_OPEN}\n{json.dumps(one)}\n{_CLOSE}")
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**plain, "content": "\n".join(text)}


def _described(use: ToolUse) -> str:
    tools = "\n".join(json.dumps(schema) for schema in use.schemas)
    return (
        "You may call functions to answer. Their signatures are within <tools></tools>:\n"
        f"<tools>\n{tools}\n</tools>\n"
        "For each call, write a JSON object with the function's name and arguments within "
        f"{_OPEN}{_CLOSE}:\n"
        f'{_OPEN}\n{{"name": <name>, "arguments": <object>}}\n{_CLOSE}'
    )
