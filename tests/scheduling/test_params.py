"""What `SamplingParams` refuses, and by which name."""

from __future__ import annotations

import math

import pytest

from pagedkv.errors import RequestError
from pagedkv.scheduling.params import MAX_STOP_CHARS, SamplingParams


@pytest.mark.parametrize(
    "bad",
    [
        {"stop": 5},
        {"stop": [5]},
        {"stop": b"x"},
        {"stop": {"x": 1}},
        {"stop": "x" * (MAX_STOP_CHARS + 1)},
        {"stop_token_ids": 5},
        {"stop_token_ids": b"ab"},
        {"stop_token_ids": "ab"},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [True]},
        {"stop_token_ids": [2**31]},
        {"logit_bias": [1]},
        {"logit_bias": 5},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {"a": 1.0}},
        {"logit_bias": {1: True}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: 10**400}},
        {"ignore_eos": "no"},
        {"skip_special_tokens": "x"},
        {"include_stop_str_in_output": 1},
        {"temperature": "hot"},
        {"seed": 1.0},
        {"n": None},
    ],
    ids=lambda bad: f"{bad!r:.40}",
)
def test_foreign_exception_a_bad_field_is_refused_by_its_name(bad):
    with pytest.raises(RequestError, match=f"^{next(iter(bad))}=") as info:
        SamplingParams(**bad)
    assert len(str(info.value)) < 400


def test_none_and_lists_of_the_greatest_length_are_fine():
    empty = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)
    assert empty == SamplingParams()
    longest = SamplingParams(stop=["x" * MAX_STOP_CHARS] * 64, stop_token_ids=range(256))
    assert len(longest.stop) == 64 and longest.stop_token_ids[-1] == 255
