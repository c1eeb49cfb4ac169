"""A queue that is full: who is refused, when, and what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from serving import GatedExecutor, http_server, settings, toy_core
from tiny_llm import VOCAB, byte_tokenizer
from transformers import PreTrainedTokenizerFast

from pagedkv.engine.facts import Facts
from pagedkv.engine.toy import ToyExecutor
from pagedkv.errors import OverloadError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.tenants import Tenant
from pagedkv.server.app import create_app
from pagedkv.server.async_engine import AsyncEngine
from pagedkv.server.door import Door

KEYS = {"key-a": "alice", "key-b": "bob"}


class CountingTokenizer(PreTrainedTokenizerFast):
    """Knows what it was given."""

    def __call__(self, text: str, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(text)
        return super().__call__(text, *args, **kwargs)


class Blocked:
    """A server in whose first step, of one request, nothing moves; others wait meanwhile.

    The first one counts as well: that it has started is known when its step is over.
    """

    def __init__(
        self, url: str, executor: GatedExecutor, seen: list[str], engines: list[AsyncEngine]
    ) -> None:
        self.url, self.executor, self.seen, self.engines = url, executor, seen, engines

    async def ask(self, key: str = "key-a", **body: Any) -> httpx.Response:
        asked = {"prompt": "abc", "max_tokens": 2, **body}
        async with httpx.AsyncClient(timeout=60) as client:
            return await client.post(
                f"{self.url}/v1/completions", json=asked, headers={"x-api-key": key}
            )

    async def live(self, requests: int) -> None:
        while self.engines[0].num_live < requests:
            await asyncio.sleep(0)

    async def first(self) -> asyncio.Task[httpx.Response]:
        task = asyncio.create_task(self.ask(prompt="the first"))
        assert await asyncio.to_thread(self.executor.reached.acquire, timeout=60)
        return task


@contextmanager
def blocked(**bounds: Any) -> Iterator[Blocked]:
    executor = GatedExecutor(ToyExecutor(64, 4, vocab_size=VOCAB))
    tokenizer = byte_tokenizer()
    tokenizer.__class__ = CountingTokenizer
    tokenizer.seen = []
    engines: list[AsyncEngine] = []

    def make_app(engine: AsyncEngine) -> FastAPI:
        engines.append(engine)
        return create_app(engine, settings(KEYS))

    with http_server(
        lambda: toy_core(executor=executor, **bounds), make_app, lambda: tokenizer
    ) as url:
        yield Blocked(url, executor, tokenizer.seen, engines)


def test_what_the_queue_has_no_room_for_is_refused_before_it_is_tokenised() -> None:
    async def main() -> None:
        with blocked(max_num_waiting=3) as server:
            first = await server.first()
            others = [asyncio.create_task(server.ask(prompt=f"p{i}")) for i in range(10)]
            refused = [await task for task in islice(asyncio.as_completed(others), 8)]
            server.executor.allow(None)
            served = [a for a in [await task for task in [first, *others]] if a not in refused]
            assert [a.status_code for a in refused] == [429] * 8
            assert [a.status_code for a in served] == [200] * 3
            assert len(server.seen) == 3
            for answer in refused:
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["type"] == "rate_limit_error"
                assert "max_num_waiting=3" in answer.json()["error"]["message"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("bounds", "fits", "too_much", "bound"),
    [
        ({"max_num_waiting": 4}, {"n": 2}, {"n": 3}, "max_num_waiting=4"),
        ({"max_num_waiting": 4}, {"n": 2}, {"prompt": ["a", "b", "c"]}, "max_num_waiting=4"),
        ({"max_waiting_tokens": 18}, {"prompt": "abcde"}, {"prompt": "abcde"}, "tokens=18"),
        ({"max_waiting_tokens": 18}, {"prompt": [1] * 5}, {"prompt": [1] * 5}, "tokens=18"),
        (
            {"tenants": (("alice", Tenant(max_waiting=2)),)},
            {"prompt": "a"},
            {"prompt": "a"},
            "max_waiting=2",
        ),
    ],
)
def test_samples_prompts_tokens_and_quotas_count(
    bounds: dict[str, Any], fits: dict[str, Any], too_much: dict[str, Any], bound: str
) -> None:
    async def main() -> None:
        with blocked(**bounds) as server:
            first = await server.first()
            waits = asyncio.create_task(server.ask(**fits))
            await server.live(2)
            refused = await server.ask(**too_much)
            other = asyncio.create_task(server.ask(key="key-b", prompt="b"))
            server.executor.allow(None)
            assert (refused.status_code, (await first).status_code) == (429, 200)
            assert bound in refused.json()["error"]["message"]
            assert (await waits).status_code == 200
            assert (await other).status_code == 200

    asyncio.run(main())


def test_what_is_being_read_takes_room_until_that_is_over() -> None:
    door = Door(Facts(SchedulerConfig(8, 16, 64, max_num_waiting=2), 64, 4, 64))
    with (
        door.reading(None, requests=1, samples=2, tokens=6),
        pytest.raises(OverloadError, match="max_num_waiting=2"),
        door.reading(None, requests=1, samples=1, tokens=3),
    ):
        raise AssertionError("it was let in")
    with door.reading(None, requests=1, samples=1, tokens=3):
        pass


def test_what_the_core_has_taken_is_not_on_its_way_any_more() -> None:
    door = Door(Facts(SchedulerConfig(8, 16, 64, max_num_waiting=2), 64, 4, 64))
    adds = [Add(name, (1, 2), SamplingParams(), 0.0, 0) for name in "abcde"]
    for number, add in enumerate(adds[:2], 1):
        door.check(add)
        door.sent(add, number)
    with pytest.raises(OverloadError, match="max_num_waiting=2"):
        door.check(adds[2])
    door.update(1, None)
    door.check(adds[2])
    door.sent(adds[2], 3)  # "b" waits still
    door.update(1, None, ["c", "c"])
    door.check(adds[3])
    door.sent(adds[3], 4)
    with pytest.raises(OverloadError, match="max_num_waiting=2"):
        door.check(adds[4])


def test_there_is_room_again_when_requests_have_started() -> None:
    async def main() -> None:
        with blocked(max_num_waiting=1) as server:
            first = await server.first()
            assert (await server.ask()).status_code == 429
            server.executor.allow(None)
            assert (await first).status_code == 200
            assert (await server.ask()).status_code == 200

    asyncio.run(main())


def test_a_request_that_can_never_fit_is_told_the_numbers() -> None:
    with http_server() as url:
        asked = {"prompt": "x" * 64, "max_tokens": 1}
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "64 tokens" in message and "max_model_len=64" in message
