"""Frames come back as what they were."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from pagedkv.engine.facts import Facts
from pagedkv.engine.wire import (
    Answer,
    Ask,
    Batch,
    Close,
    Configure,
    Died,
    Ready,
    pack,
    unpack_from_core,
    unpack_to_core,
)
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import (
    Abort,
    Add,
    Delta,
    Drain,
    Drawn,
    Hypothesis,
    RequestUsage,
    Resume,
    StepStats,
)
from pagedkv.scheduling.params import BeamSearchParams, SamplingParams
from pagedkv.scheduling.step import TokenLogprobs
from pagedkv.scheduling.structured import StructuredOutputs
from pagedkv.scheduling.tenants import Tenant

PARAMS = SamplingParams(n=2, stop=("a", "b"), logit_bias={3: -1.5}, seed=-5, max_tokens=None)
FORMS = [
    {"json": {"type": "object", "enum": ["\ud800", None, 0.5]}},
    {"json_object": True},
    {"choice": ["a", "é"]},
    {"regex": "a+"},
    {"grammar": 'start: "a"'},
]
BEAM = BeamSearchParams(beam_width=3, max_tokens=4)


@pytest.mark.parametrize(
    "message",
    [
        Add("x", (1, 2, 3), PARAMS, 1.5, 2**63 - 1, -3, "tenant", None, "salt", 0.5, 0.25, 1e9),
        Add("beams", (1,), BEAM.sampling, 1.0, 0, beam=BEAM),
        Abort("x"),
        Abort("x", 3, "stop"),
        Drain(),
        Resume(Add("x", (1,), PARAMS, 1.5, 7), (Drawn((1, 2)), Drawn((3,), "stop"))),
        Resume(
            Add("beams", (1,), BEAM.sampling, 1.0, 0, beam=BEAM),
            (Drawn((1, 2), logprob=-0.1),),
            (Hypothesis((1, 5), -1e-9, "stop"),),
            *(3.0, 2.0, 2.25, 2.5, 4),
            RequestUsage(1, 2, 3, 4, 5),
        ),
        Ask(1, "explain", "x"),
        Configure({"model": "m", "tiers": {"host_memory": 1}, "list": [1, None, 0.5]}),
        Close(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_to_the_core(message) -> None:
    assert unpack_to_core(pack(message)) == message


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forms_of_outputs(form) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(**form))
    assert unpack_to_core(pack(Add("x", (1,), params, 0.0, 0))).params == params


def test_from_the_core() -> None:
    config = SchedulerConfig(
        8, 16, 64, (2,), 50, ((1, 2),), "fair", tenants=(("a", Tenant(2.0, 3)),)
    )
    stats = StepStats(*range(1, 17))
    deltas = (
        Delta("x", 1, (5, 6), admitted_at=0.25),
        Delta("y", 0, (7,), finish_reason="stop", complete=True),
    )
    for frame in (
        Ready(Facts(config, 100, 16, 10, "folder", ("a line",))),
        Batch(deltas, stats, 7),
        Batch((), None, 0),
        Answer(3, {"a": [1, 2.5, None, "text", b"bytes"]}),
        Answer(3, error="why"),
        Died("InvariantError", "why"),
    ):
        assert unpack_from_core(pack(frame)) == frame


def test_log_probabilities_are_bit_equal() -> None:
    scored = TokenLogprobs(
        np.array([7, 0, 2**31 - 1], np.int32), np.array([-0.1, -np.inf, 1e-45], np.float32), 3
    )
    frame = unpack_from_core(pack(Batch((Delta("x", 0, (7,), (scored, None)),), None, 1)))
    assert isinstance(frame, Batch)
    back, nothing = frame.deltas[0].logprobs
    assert nothing is None and back is not None and back.rank == 3
    for name in ("ids", "values"):
        sent, got = getattr(scored, name), getattr(back, name)
        assert sent.dtype == got.dtype and sent.tobytes() == got.tobytes()


def test_what_is_no_frame_is_an_error() -> None:
    for data in (b"", b"\xc1", msgspec.msgpack.encode({"type": "Batch"}), pack(Close())):
        with pytest.raises(msgspec.DecodeError):
            unpack_from_core(data)
    unknown = msgspec.msgpack.encode(
        {"type": "Move", "request_id": "x", "epoch": 1, "to": "d", "mode": "at once"}
    )
    with pytest.raises(msgspec.DecodeError, match="mode"):
        unpack_to_core(unknown)
    with pytest.raises(TypeError, match="cannot be sent"):
        pack(Answer(1, object()))
