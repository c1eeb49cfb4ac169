"""Answers of a given form, and tools, through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import MODEL, http_server, toy_core
from tiny_llm import CHAT, byte_tokenizer

from pagedkv.server.openai.tools import (
    Tool,
    ToolCall,
    ToolUse,
    chat_messages,
    new_calls,
    tool_use,
)

MESSAGES = [{"role": "user", "content": "hello"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "give-up", "description": "if all else fails"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
ANY_ROLE = CHAT.replace("not in ('user', 'assistant')", "== ''")


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    def make() -> Any:
        return toy_core(num_blocks=600, max_model_len=1200)

    with http_server(make, tokenizer=lambda: byte_tokenizer(ANY_ROLE)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"messages": MESSAGES, "max_tokens": 250, "seed": 1, **fields}
    return client.chat.completions.create(model=MODEL, **fields)


# ---- forms


def test_an_answer_has_the_form_of_its_schema(client: openai.OpenAI) -> None:
    schema = {"name": "trip", "schema": PARAMETERS, "strict": True}
    answer = chat(client, response_format={"type": "json_schema", "json_schema": schema}, n=3)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        found = json.loads(choice.message.content)
        assert found.keys() == {"city", "days"} and 1 <= found["days"] <= 9


def test_a_json_object_and_text(client: openai.OpenAI) -> None:
    answer = chat(client, response_format={"type": "json_object"}, seed=2)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.choices[0].message.content.lstrip().startswith("{")
    free = chat(client, max_tokens=9).choices[0].message.content
    text = chat(client, max_tokens=9, response_format={"type": "text"})
    assert text.choices[0].message.content == free


def test_completions_have_forms_as_well(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt="x",
        max_tokens=9,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert answer.choices[0].text in ("yes", "no")


def test_a_streamed_form_is_the_whole_one(client: openai.OpenAI) -> None:
    form = {"structured_outputs": {"regex": "[a-f]{20}"}}
    whole = chat(client, extra_body=form).choices[0].message.content
    chunks = chat(client, extra_body=form, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "nonsense"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"not": {}}},
                }
            },
            None,
        ),
        ({"extra_body": {"structured_outputs": {}}}, None),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, None),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"use_beam_search": True}},
            "structured_outputs",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": TOOLS * 100}, "tools"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "nonsense"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "response_format",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "extra_body": {"use_beam_search": True}},
            "tool_choice",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]},
            "messages",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_a_bad_request(
    client: openai.OpenAI, fields: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert caught.value.param == param


def test_a_grammar_that_fails_is_an_error_of_its_own_request(client: openai.OpenAI) -> None:
    """It names a token that the check in front knows and the model does not."""
    broken = {"structured_outputs": {"grammar": 'start: "x" <[258]>'}}

    def good(seed: int) -> str:
        return str(chat(client, seed=seed, max_tokens=40).choices[0].message.content)

    alone = [good(seed) for seed in range(4)]
    with ThreadPoolExecutor(5) as pool:
        bad = pool.submit(chat, client, extra_body=broken)
        assert list(pool.map(good, range(4))) == alone
    with pytest.raises(openai.InternalServerError, match="Token range"):
        bad.result()


# ---- tools


def check_calls(calls: Any) -> None:
    for call in calls:
        assert call.id.startswith("call_") and call.type == "function"
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            assert arguments["city"] in ("Paris", "Rome") and 1 <= arguments["days"] <= 9
        else:
            assert (call.function.name, arguments) == ("give-up", {})


def test_a_demanded_call_is_one_of_the_tools(client: openai.OpenAI) -> None:
    answer = chat(
        client, tools=TOOLS, tool_choice="required", n=6, parallel_tool_calls=False, max_tokens=400
    )
    names = set()
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        check_calls([call])
        names.add(call.function.name)
    assert names == {"weather", "give-up"}


def test_a_named_tool_is_called_once(client: openai.OpenAI) -> None:
    (choice,) = chat(client, tools=TOOLS, tool_choice=NAMED).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason) == ("weather", "stop")
    check_calls([call])


def test_streamed_calls_are_the_whole_ones(client: openai.OpenAI) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "n": 2, "max_tokens": 400}
    whole = [
        [(c.function.name, c.function.arguments) for c in choice.message.tool_calls]
        for choice in chat(client, **fields).choices
    ]
    streamed: list[list[list[str]]] = [[], []]
    reasons: dict[int, str] = {}
    for chunk in chat(client, **fields, stream=True):
        for choice in chunk.choices:
            assert not choice.delta.content
            reasons[choice.index] = choice.finish_reason or ""
            for part in choice.delta.tool_calls or []:
                calls = streamed[choice.index]
                if part.index == len(calls):
                    assert part.id and part.type == "function"
                    calls.append([part.function.name, ""])
                calls[part.index][1] += part.function.arguments
    assert [[tuple(call) for call in calls] for calls in streamed] == whole
    assert set(reasons.values()) <= {"tool_calls", "length"}


def test_tools_that_may_be_called_leave_the_text_free(client: openai.OpenAI) -> None:
    (choice,) = chat(client, tools=TOOLS, max_tokens=9).choices
    assert choice.message.content and not choice.message.tool_calls
    none = chat(client, tools=TOOLS, tool_choice="none", max_tokens=9)
    assert none.choices[0].message.content == chat(client, max_tokens=9).choices[0].message.content


def test_a_conversation_with_calls_goes_on(client: openai.OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "give-up", "arguments": "{}"}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "gave up"},
    ]
    assert chat(client, messages=messages, tools=TOOLS, max_tokens=3).choices[0].message.content


# ---- reading calls


def use(**fields: Any) -> ToolUse:
    found = tool_use(
        [Tool.model_validate(tool) for tool in TOOLS], fields.get("choice"), fields.get("parallel")
    )
    assert found is not None
    return found


WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
GIVE_UP = '<tool_call>{"arguments": {}, "name": "give-up"}</tool_call>'


@pytest.mark.parametrize(
    ("text", "beside", "calls"),
    [
        ("plain text ", "plain text ", []),
        ("", "", []),
        (WEATHER, "", [("weather", '{"city": "Paris"}')]),
        (f"I will look.\n{WEATHER}\n", "I will look.", [("weather", '{"city": "Paris"}')]),
        (
            f"{WEATHER}\n{GIVE_UP} so",
            "\n so",
            [("weather", '{"city": "Paris"}'), ("give-up", "{}")],
        ),
        (WEATHER.removesuffix("}\n</tool_call>"), "", [("weather", '{"city": "Paris"}')]),
        (WEATHER[:60], "", [("weather", WEATHER[45:60])]),
        (WEATHER[:30], WEATHER[:30], []),
        ("<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
        (WEATHER.replace("weather", "other"), WEATHER.replace("weather", "other"), []),
        (
            '<tool_call>{"name": "weather", "arguments": {"city": "}</tool_call>{"}}</tool_call>',
            "",
            [("weather", '{"city": "}</tool_call>{"}')],
        ),
        ("a <tool_cal", "a <tool_cal", []),
    ],
)
def test_calls_in_a_text(text: str, beside: str, calls: list[tuple[str, str]]) -> None:
    assert use().read(text, ended=True) == (beside, [ToolCall(*call) for call in calls])


def test_only_one_call_where_one_is_wanted() -> None:
    _, calls = use(parallel=False).read(WEATHER + GIVE_UP, ended=True)
    assert [call.name for call in calls] == ["weather"]


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "\n", " ", "text", "<", '"', "\\", "{", "}"),
        *('{"name": "weather", "arguments": ', '{"city": "Rome"}', '"give-up"', '{"name": '),
        *(WEATHER, GIVE_UP, "é", '</tool_call>"'),
    ]
)


@given(st.lists(PIECES, max_size=12).map("".join), st.booleans())
def test_what_is_streamed_adds_up_to_the_whole(text: str, parallel: bool) -> None:
    """A character at a time: nothing that was sent is ever taken back."""
    tools, sent, beside = use(parallel=parallel), list[int](), ""
    calls: list[ToolCall] = []
    for end in range(len(text) + 1):
        for ended in (False, True)[: 1 + (end == len(text))]:
            now, found = tools.read(text[:end], ended)
            assert now.startswith(beside)
            beside = now
            for part in new_calls(found, sent):
                function = part["function"]
                if part["index"] == len(calls):
                    calls.append(ToolCall(function["name"], function["arguments"]))
                else:
                    name, before = calls[part["index"]]
                    calls[part["index"]] = ToolCall(name, before + function["arguments"])
    assert (beside, calls) == tools.read(text, ended=True)


# ---- the prompt


def test_a_template_without_tools_is_told_of_them_in_words() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"a":1}'}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "assistant", "content": "Well.", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    system, assistant, tool = chat_messages(messages, use(), known=False)
    assert system["content"].startswith("Be kind.\n\n") and '"weather"' in system["content"]
    (written,) = use().read(assistant["content"], ended=True)[1]
    assert (written.name, json.loads(written.arguments)) == ("weather", {"a": 1})
    assert "tool_calls" not in assistant
    assert (tool["role"], "sunny" in tool["content"]) == ("user", True)
    (first, *_) = chat_messages(messages[1:], use(), known=False)
    assert first["role"] == "system" and "give-up" in first["content"]


def test_a_template_with_tools_gets_arguments_as_objects() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"a":1}'}}
    (message,) = chat_messages([{"role": "assistant", "tool_calls": [call]}], use(), known=True)
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
