"""The embedded model under a JSON schema: what it writes is valid, whatever else runs."""

from __future__ import annotations

import json

import jsonschema_rs

from pagedkv import LLM, SamplingParams, StructuredOutputs

SCHEMA = {
    "$defs": {"tag": {"enum": ["new", "used", "broken"]}},
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 1, "maxLength": 24},
        "price": {"type": "number", "minimum": 0, "maximum": 1000},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 2},
        "seller": {
            "type": "object",
            "properties": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["title", "price", "tags", "seller"],
    "additionalProperties": False,
}
ASKED = [
    {"role": "user", "content": f"Describe {thing} that is for sale, as JSON."}
    for thing in ("a bicycle", "an old clock", "a lamp")
]


def make(num_blocks: int) -> LLM:
    return LLM(
        "smollm2-135m-instruct",
        dtype="bfloat16",
        num_blocks=num_blocks,
        max_model_len=256,
        deterministic=True,
    )


def answers(llm: LLM, asked: list[dict[str, str]]) -> list[list[str]]:
    params = SamplingParams(
        n=2,
        max_tokens=140,
        seed=1,
        temperature=0.8,
        structured_outputs=StructuredOutputs(json=SCHEMA),
    )
    outputs = llm.chat([[message] for message in asked], params)
    assert {o.finish_reason for output in outputs for o in output.outputs} == {"stop"}
    return [[o.text for o in output.outputs] for output in outputs]


def test_outputs_are_valid_and_those_of_their_solo_runs() -> None:
    llm = make(100)
    alone = [answers(llm, [message])[0] for message in ASKED]
    for text in (text for texts in alone for text in texts):
        jsonschema_rs.validator_for(SCHEMA).validate(json.loads(text))
    assert len({text for texts in alone for text in texts}) == 6
    pressed = make(14)
    assert answers(pressed, ASKED) == alone
    assert pressed.engine.core.scheduler.stats.num_preemptions > 0
