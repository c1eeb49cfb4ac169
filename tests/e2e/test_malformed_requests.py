"""Requests that nobody should send: each is answered, none with a 5xx, and nothing is left held.

The bodies come from the server's own OpenAPI document, through schemathesis, and from a list of
those that have brought other servers down.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from serving import MODEL, http_server, toy_core

from pagedkv.engine.core import EngineCore


@contextmanager
def watched_server() -> Iterator[tuple[str, EngineCore]]:
    """A server, and its core, in which nothing may be held at the end."""
    core = toy_core()
    with http_server(lambda: core) as url:
        yield url, core
        good = httpx.post(
            f"{url}/v1/completions",
            json={"model": MODEL, "prompt": "alive", "max_tokens": 3, "temperature": 0},
            timeout=60,
        )
        assert good.status_code == 200, good.text
    assert core.scheduler.manager.num_held_blocks == 0
    assert len(core.scheduler) == 0


def missed_its_deadline(case: Any, response: Any) -> bool:
    """Whether a request that is well formed got what it asked for: no answer after its deadline."""
    asked = isinstance(case.body, dict) and case.body.get("deadline_ms") is not None
    return (
        asked
        and response.status_code == 504
        and (json.loads(response.text)["error"]["code"] == "deadline")
    )


def fuzz(count: int, number: int) -> Counter[int]:
    """Answers by status to `count` requests drawn from the OpenAPI document."""
    statuses: Counter[int] = Counter()
    with watched_server() as (url, _):
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        operations = [found.ok() for found in schema.get_all_operations()]
        cases = st.one_of(
            *(
                operation.as_strategy(generation_mode=mode)
                for operation in operations
                for mode in (GenerationMode.NEGATIVE, GenerationMode.POSITIVE)
                if operation.method == "post" or mode is GenerationMode.POSITIVE
            )
        )

        @seed(number)
        @settings(
            max_examples=count,
            phases=[Phase.generate],
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases)
        def send(case: Any) -> None:
            response = case.call(timeout=60)
            statuses[response.status_code] += 1
            assert response.status_code < 500 or missed_its_deadline(case, response), (
                case.body,
                response.text,
            )

        send()
    return statuses


def test_two_hundred_drawn_from_the_document() -> None:
    statuses = fuzz(200, 1)
    assert statuses.total() >= 200
    assert sum(count for status, count in statuses.items() if 400 <= status < 500) >= 50


@pytest.mark.deep
def test_two_thousand_drawn_from_the_document() -> None:
    assert fuzz(2000, 2).total() >= 2000


GOOD = {"model": MODEL, "prompt": "a prompt", "max_tokens": 3}
BAD: tuple[Any, ...] = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"model": "toy", "prompt": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    b'{"model": "toy", "prompt": "x", "temperature": NaN}',
    b'{"model": "toy", "prompt": "x", "temperature": Infinity}',
    b'{"model": "toy", "prompt": "x", "temperature": 1e999}',
    b'{"model": "toy", "prompt": "x", "logit_bias": {"1": NaN}}',
    b'{"model": "toy", "prompt": "x", "n": ' + b"9" * 5_000 + b"}",
    b'{"model": "toy", "prompt": "\\ud800"}',
    {**GOOD, "model": "another"},
    {**GOOD, "prompt": ""},
    {**GOOD, "prompt": [""]},
    {**GOOD, "prompt": []},
    {**GOOD, "prompt": [[]]},
    {**GOOD, "prompt": None},
    {**GOOD, "prompt": [1, "a"]},
    {**GOOD, "prompt": [-1]},
    {**GOOD, "prompt": [10**9]},
    {**GOOD, "prompt": [2**70]},
    {**GOOD, "prompt": [True]},
    {**GOOD, "prompt": [0.5]},
    {**GOOD, "prompt": "x" * 10_000},
    {**GOOD, "prompt": ["x"] * 10_000},
    {**GOOD, "max_tokens": -1},
    {**GOOD, "max_tokens": 2**40},
    {**GOOD, "max_tokens": "many"},
    {**GOOD, "n": 0},
    {**GOOD, "n": -1},
    {**GOOD, "n": 10**9},
    {**GOOD, "temperature": -1},
    {**GOOD, "temperature": "hot"},
    {**GOOD, "top_p": 0},
    {**GOOD, "top_p": 2},
    {**GOOD, "top_k": -5},
    {**GOOD, "min_p": 3},
    {**GOOD, "logprobs": 10**6},
    {**GOOD, "logprobs": -1},
    {**GOOD, "stop": [""]},
    {**GOOD, "stop": ""},
    {**GOOD, "stop": ["x"] * 500_000},
    {**GOOD, "stop": [1]},
    {**GOOD, "stop_token_ids": [10**9]},
    {**GOOD, "stop_token_ids": list(range(100_000))},
    {**GOOD, "logit_bias": {"a": 1}},
    {**GOOD, "logit_bias": {"99999999": 1}},
    {**GOOD, "logit_bias": {"-1": 1}},
    {**GOOD, "logit_bias": {str(i): 1 for i in range(100_000)}},
    {**GOOD, "presence_penalty": 1e9},
    {**GOOD, "frequency_penalty": -1e9},
    {**GOOD, "repetition_penalty": 0},
    {**GOOD, "seed": 2**80},
    {**GOOD, "seed": "seed"},
    {**GOOD, "min_tokens": 10, "max_tokens": 3},
    {**GOOD, "suffix": "end"},
    {**GOOD, "stream": "perhaps"},
    {**GOOD, "stream_options": {"include_usage": 5}, "stream": True},
    {**GOOD, "priority": 10**12},
    {**GOOD, "cache_salt": ""},
    {**GOOD, "cache_salt": "x" * 5_000},
    {**GOOD, "ttft_slo_ms": -1},
    {**GOOD, "deadline_ms": -1},
    {**GOOD, "tenant": "somebody else"},
    {**GOOD, "use_beam_search": True, "n": 10**6},
    {**GOOD, "no_such_field": 1},
)


def test_a_list_of_bodies_that_have_brought_others_down() -> None:
    with watched_server() as (url, _), httpx.Client(timeout=60) as client:
        for body in BAD:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"content-type": "application/json"}
            answer = client.post(f"{url}/v1/completions", content=content, headers=headers)
            assert 400 <= answer.status_code < 500, (content[:200], answer.text[:500])
            error = answer.json()["error"]
            assert error["message"] and len(error["message"]) < 2_000, content[:200]
