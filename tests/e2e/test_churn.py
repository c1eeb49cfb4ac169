"""Requests of all kinds, a third of them given up at random moments: the others do not notice."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from serving import http_server, settings
from tiny_llm import save_tiny_llm

from pagedkv.engine.core import EngineCore
from pagedkv.engine.llm import LLM
from pagedkv.engine.tiers import TierConfig
from pagedkv.server.app import create_app
from pagedkv.server.async_engine import AsyncEngine, Stream
from pagedkv.server.openai.answers import Answer

MIB = 2**20
SHARE = 0.3  # of requests that are given up
AT_ONCE = 24
WORDS = [
    "block",
    "table",
    "pool",
    "slot",
    "page",
    "cache",
    "fork",
    "swap",
    "copy",
    "prefix",
    "step",
    "queue",
    "row",
    "seat",
    "tail",
]

KINDS: Sequence[dict[str, Any]] = (
    {"max_tokens": 24},
    {"max_tokens": 12, "stream": True},
    {"max_tokens": 16, "stream": True, "n": 3, "temperature": 1.0, "seed": 11},
    {"max_tokens": 10, "n": 2, "use_beam_search": True, "temperature": 0},
    {"max_tokens": 12, "stream": True, "logprobs": 3, "temperature": 0.8, "seed": 5},
    {"max_tokens": 16, "stop": ["e", "\n"], "temperature": 1.0, "seed": 3},
    {"max_tokens": 12, "presence_penalty": 1.0, "logit_bias": {"5": 2.0}, "temperature": 0},
    {"max_tokens": 12, "stream": True, "echo": True, "ignore_eos": True, "temperature": 0},
)


def bodies(number: int, words: int, seed: int) -> list[dict[str, Any]]:
    """Prompts of up to so many words; half of them begin alike."""
    draw = random.Random(seed)
    made = []
    for i, kind in zip(range(number), itertools.cycle(KINDS)):
        text = " ".join(draw.choices(WORDS, k=draw.randint(1, words)))
        prompt = f"a table of blocks: {text}" if i % 2 else text
        made.append({"temperature": 0, **kind, "prompt": prompt})
    return made


class Server:
    def __init__(self, url: str, engines: list[AsyncEngine], cores: list[EngineCore]) -> None:
        self.url, self.engine, self.core = url, engines[0], cores[0]


@contextmanager
def server(make: Callable[[], LLM]) -> Iterator[Server]:
    engines: list[AsyncEngine] = []
    llms: list[LLM] = []

    def make_core() -> EngineCore:
        llms.append(make())
        return llms[0].engine.core

    def make_app(engine: AsyncEngine) -> FastAPI:
        engines.append(engine)
        return create_app(engine, settings())

    with http_server(make_core, make_app, lambda: llms[0].get_tokenizer()) as url:
        yield Server(url, engines, [llms[0].engine.core])
    llms[0].close()


class Steps:
    """Counts what the engine has brought, for those who wait for some number."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._loop = asyncio.get_running_loop()
        self.count, self._waiting = 0, list[tuple[int, asyncio.Future[None]]]()
        self._engine = engine
        engine.watchers.append(self._tell)

    def close(self) -> None:
        self._engine.watchers.remove(self._tell)

    async def at(self, count: int) -> None:
        future = self._loop.create_future()
        self._waiting.append((count, future))
        await future

    def _tell(self, batch: object) -> None:
        self._loop.call_soon_threadsafe(self._tick)

    def _tick(self) -> None:
        self.count += 1
        for count, future in self._waiting:
            if count <= self.count and not future.done():
                future.set_result(None)


async def text(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """The answer without what differs between two runs: ids and times."""
    if not body.get("stream"):
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return "|".join(choice["text"] for choice in answer.json()["choices"])
    texts: dict[int, str] = {}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        last = ""
        async for line in response.aiter_lines():
            if not line:
                continue
            last = line.removeprefix("data: ")
            if last != "[DONE]":
                for choice in httpx.Response(200, text=last).json()["choices"]:
                    index = choice["index"]
                    texts[index] = texts.get(index, "") + choice["text"]
        assert last == "[DONE]"
    return "|".join(texts[i] for i in sorted(texts))


async def alone(url: str, asked: Sequence[dict[str, Any]]) -> list[str]:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        return [await text(client, body) for body in asked]


async def churn(
    running: Server, asked: Sequence[dict[str, Any]], seed: int
) -> tuple[list[str | None], int]:
    """The texts, None for those that were given up; and how many of these there are."""
    draw = random.Random(seed)
    places, steps = asyncio.Semaphore(AT_ONCE), Steps(running.engine)
    leaving = {
        i: draw.randint(0, 30) for i in draw.sample(range(len(asked)), int(SHARE * len(asked)))
    }
    limits = httpx.Limits(max_connections=AT_ONCE)

    async def one(i: int, body: dict[str, Any]) -> str | None:
        async with places:
            task = asyncio.create_task(text(client, body))
            if i in leaving:
                leave = asyncio.create_task(steps.at(steps.count + leaving[i]))
                if leaving[i] == 0:
                    leave.cancel()
                await asyncio.wait({task, leave}, return_when=asyncio.FIRST_COMPLETED)
                leave.cancel()
                if not task.done():
                    task.cancel()
                    await asyncio.wait({task})
                    return None
            return await task

    async with httpx.AsyncClient(base_url=running.url, timeout=600, limits=limits) as client:
        texts = await asyncio.gather(*(one(i, body) for i, body in enumerate(asked)))
    while running.engine.num_live or len(running.core.scheduler):
        await asyncio.sleep(0)  # the last that were given up are on their way out
    steps.close()
    return texts, sum(one is None for one in texts)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def assert_equal_to_solo(texts: Sequence[str | None], solo: Sequence[str]) -> None:
    for i, (got, wanted) in enumerate(zip(texts, solo, strict=True)):
        assert got is None or got == wanted, f"request {i}"


def assert_nothing_left(running: Server) -> None:
    manager = running.core.scheduler.manager
    manager.check()
    assert manager.num_held_blocks == 0 and manager.num_open_sequences == 0
    assert running.engine.num_live == 0 and len(running.engine.front) == 0
    for _ in range(100):  # answers of clients that have just gone are on their way out
        gc.collect()
        left = [type(one).__name__ for one in gc.get_objects() if type(one) in (Stream, Answer)]
        if not left:
            break
    assert not left


def test_sixty_requests_on_a_tiny_model(tmp_path: Path) -> None:
    save_tiny_llm(tmp_path)

    def make() -> LLM:
        # About two thirds of what those that run would take: requests are preempted, and swapped.
        return LLM(
            tmp_path,
            num_blocks=72,
            block_size=8,
            max_num_seqs=16,
            max_num_batched_tokens=64,
            deterministic=True,
            scheduling={"recovery": "swap"},
            tiers=TierConfig(host_memory=4 * MIB),
        )

    asked = bodies(60, 12, seed=1)
    with server(make) as running:
        solo = asyncio.run(alone(running.url, asked))
    with server(make) as running:
        texts, left = asyncio.run(churn(running, asked, seed=2))
        assert left >= 9  # of 18: some end before their moment comes
        assert running.core.scheduler.stats.num_preemptions > 0
        assert_equal_to_solo(texts, solo)
        assert_nothing_left(running)


@pytest.mark.deep
def test_five_hundred_requests_on_the_embedded_model_three_times() -> None:
    def make() -> LLM:
        return LLM(
            "smollm2-135m-instruct",
            num_blocks=160,
            block_size=16,
            max_num_seqs=24,
            deterministic=True,
            scheduling={"recovery": "swap"},
            tiers=TierConfig(host_memory=256 * MIB),
        )

    asked = bodies(100, 40, seed=1)
    with server(make) as running:
        solo = asyncio.run(alone(running.url, asked))
    sizes = []
    with server(make) as running:
        for seed in range(3):
            texts, left = asyncio.run(churn(running, asked * 5, seed))
            assert left >= 75
            assert_equal_to_solo(texts, solo * 5)
            assert_nothing_left(running)
            sizes.append(resident_bytes())
    assert sizes[2] <= sizes[0] + 64 * MIB
