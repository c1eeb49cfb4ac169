"""Plain values as JSON and back."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from pagedkv.engine.values import from_json, to_json
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Abort, Add, Drain, Drawn, Hypothesis, RequestUsage, Resume
from pagedkv.scheduling.params import BeamSearchParams, SamplingParams
from pagedkv.scheduling.step import Result, TokenLogprobs, Transferred
from pagedkv.scheduling.structured import StructuredOutputs
from pagedkv.scheduling.tenants import Tenant

SCORED = TokenLogprobs(np.array([3, 1], np.int32), np.array([-0.1, -np.inf], np.float32), 2)
PARAMS = SamplingParams(
    n=3,
    temperature=0.1,
    top_p=0.3,
    top_k=4,
    min_p=0.2,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.2,
    seed=-5,
    stop=["a", "\ud7ff"],
    stop_token_ids=[4, 5],
    ignore_eos=True,
    max_tokens=None,
    min_tokens=1,
    logprobs=2,
    prompt_logprobs=1,
    logit_bias={7: -1.5, 8: 2},
    skip_special_tokens=False,
    include_stop_str_in_output=True,
    structured_outputs=StructuredOutputs(choice=["a", "b"]),
)
VALUES = [
    Resume(
        Add("r", (1,), PARAMS, 3, -1),
        (Drawn((1, 2), logprob=-0.1), Drawn((3,), "stop")),
        (Hypothesis((1, 5), -1e-9, "stop"),),
        sent_at=0.1,
        usage=RequestUsage(1, preemptions=2),
    ),
    Add("j", (1,), SamplingParams(structured_outputs=StructuredOutputs(json={"a": [1.5]})), 0.0, 1),
    Add("a", (1, 2), SamplingParams(stop="x"), 0.1 + 0.2, 2**62),
    Add("a", (), PARAMS, 3, -1, 7, "t", None, "salt", 0.5, 1, 1e300),
    Add("b", (5,), BeamSearchParams(2, 3).sampling, 0.0, 0, beam=BeamSearchParams(2, 3, 0.7)),
    Abort("a"),
    Abort("a", 2, "stop"),
    Drain(),
    SchedulerConfig(
        8,
        9,
        100,
        (1, 2),
        50,
        ((1,), (2, 3)),
        tenants=(("x", Tenant(weight=2.0)), ("y", Tenant())),
        default_tenant=Tenant(weight=0.5),
    ),
    Result(
        tokens=np.array([1, 2], np.int32),
        indptr=np.array([0, 1, 2], np.int32),
        parents=np.array([0, 0], np.int32),
        logprobs=(SCORED, None),
        prompt_logprobs=((SCORED,), ()),
        complete=(0, 1),
        errors={3: "went wrong"},
        duration=0.1,
        shared_spans=4,
        transfers=(Transferred(3, 2, 0.5, 1),),
        sample_duration=0.05,
    ),
    Result(np.zeros(0, np.int32), np.zeros(1, np.int32), np.zeros(0, np.int32)),
]


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if dataclasses.is_dataclass(a):
        fields = (f.name for f in dataclasses.fields(a))
        return type(a) is type(b) and all(same(getattr(a, f), getattr(b, f)) for f in fields)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return a == b and type(a) is type(b)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back_as_they_were(value: object) -> None:
    assert same(from_json(type(value), json.loads(json.dumps(to_json(value)))), value)


def test_defaults_are_not_written() -> None:
    written = to_json(Add("a", (1,), SamplingParams(), 0.0, 0))
    assert written["params"].keys() <= {"stop", "stop_token_ids", "logit_bias"}
    assert written.keys() == {"request_id", "prompt", "params", "arrival", "seed"}


@pytest.mark.parametrize("kind", [Add, Abort, SamplingParams, Result, TokenLogprobs])
def test_no_field_is_left_out(kind: type) -> None:
    """Every field has, in some value above, another value than its default."""
    values = [value for value in [*VALUES, PARAMS, SCORED] if type(value) is kind]
    written = set().union(*(to_json(value).keys() for value in values))
    assert written == {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (Abort, [], "no dict"),
        (Abort, {}, "request_id"),
        (Abort, {"request_id": 5}, "5 is no str"),
        (Abort, {"request_id": "a", "sample": "x"}, "is none of"),
        (Abort, {"request_id": "a", "samples": 1}, "Abort has no 'samples'"),
        (Result, {"tokens": 1, "indptr": [], "parents": []}, "1 is no list"),
        (Result, {"tokens": ["x"], "indptr": [], "parents": []}, "invalid literal"),
        (SchedulerConfig, {"max_num_seqs": True}, "True is no int"),
    ],
)
def test_what_is_no_such_value_is_refused(kind: type, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(kind, value)


def test_what_is_not_plain_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be written"):
        to_json(Add("a", (object(),), SamplingParams(), 0.0, 0))
