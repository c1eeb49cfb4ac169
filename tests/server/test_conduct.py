"""Clients that leave, faults, slow steps and slow readers, through a real server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from serving import MODEL, GatedExecutor, http_server, settings, toy_core
from tiny_llm import VOCAB, byte_tokenizer
from transformers import PreTrainedTokenizerFast

from pagedkv.cache import InvariantError
from pagedkv.engine.core import EngineCore
from pagedkv.engine.toy import ToyExecutor, payload_bytes
from pagedkv.scheduling.step import Result, Step, Ticket
from pagedkv.scheduling.tiering import LowerTiers
from pagedkv.server.app import create_app
from pagedkv.server.async_engine import AsyncEngine
from pagedkv.tiers.host import HostTier
from pagedkv.tiers.names import Namer

PATIENCE = 60.0


TOKENS = byte_tokenizer()


class Watched:
    """A server of which the test lets every step pass, with its parts to look at."""

    def __init__(self, url: str, core: EngineCore, executor: GatedExecutor) -> None:
        self.url, self.core, self.executor = url, core, executor
        self.engine: AsyncEngine

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE) as client:
            yield client

    async def step(self, steps: int = 1) -> None:
        """Lets so many pass that have come to the executor or will."""
        for _ in range(steps):
            assert await asyncio.to_thread(self.executor.reached.acquire, timeout=PATIENCE)
            self.executor.allow(1)

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(200_000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("it did not come to that")


@contextmanager
def watched(
    tokenizer: Callable[[], PreTrainedTokenizerFast] = byte_tokenizer, **settings_: Any
) -> Iterator[Watched]:
    blocks, tier, lower = settings_.pop("num_blocks", 64), None, None
    if settings_.pop("host_tier", False):
        tier = HostTier(100 * payload_bytes(4), payload_bytes(4))
        lower = LowerTiers(tier, Namer(b"toy"), payload_bytes(4))
    executor = GatedExecutor(ToyExecutor(blocks, 4, vocab_size=VOCAB, tier=tier))
    core = toy_core(blocks, executor=executor, lower=lower, **settings_)
    server = Watched("", core, executor)

    def make_app(engine: AsyncEngine) -> FastAPI:
        server.engine = engine
        return create_app(engine, settings())

    with http_server(lambda: core, make_app, tokenizer) as url:
        server.url = url
        try:
            yield server
        finally:
            executor.allow(None)


async def held_after_two_steps(server: Watched, leave: Callable[[], Any]) -> int:
    """Blocks that are held two steps after a client has left, one more request running."""
    live = server.engine.num_live
    leave()
    await server.until(lambda: server.engine.num_live < live)
    await server.step(2)
    # The third step is planned: what the first two have freed is seen.
    assert await asyncio.to_thread(server.executor.reached.acquire, timeout=PATIENCE)
    server.executor.reached.release()
    return len(server.core.scheduler)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "steps", "limits"),
    [
        ({"prompt": "abc"}, 0, {"max_num_seqs": 1}),  # waits in the queue
        ({"prompt": "a" * 40}, 1, {}),  # a chunk of its prompt is computed
        ({"prompt": "abc"}, 3, {}),  # decoding
        ({"prompt": "abc", "n": 3, "temperature": 1.0}, 3, {}),
        ({"prompt": "abc", "n": 3, "use_beam_search": True, "temperature": 0}, 3, {}),
    ],
    ids=["queued", "prefilling", "decoding", "samples", "beams"],
)
def test_a_client_that_leaves_frees_its_blocks_within_two_steps(
    asked: dict[str, Any], steps: int, limits: dict[str, Any], stream: bool
) -> None:
    async def main() -> None:
        with watched(**limits) as server:
            async with server.client() as client:
                stays = asyncio.create_task(
                    client.post("/v1/completions", json={"prompt": "x", "max_tokens": 40})
                )
                assert await asyncio.to_thread(server.executor.reached.acquire, timeout=PATIENCE)
                server.executor.reached.release()
                body = {"max_tokens": 20, "stream": stream, "model": MODEL, **asked}
                goes = asyncio.create_task(read(client, body))
                await server.until(lambda: server.engine.num_live == 2)
                await server.step(1 + steps)
                assert await held_after_two_steps(server, goes.cancel) == 1
                server.executor.allow(None)
                assert (await stays).status_code == 200
            await server.until(lambda: server.engine.num_live == 0)
        assert server.core.scheduler.manager.num_held_blocks == 0

    asyncio.run(main())


async def read(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_bytes():
            pass


def test_a_client_that_leaves_while_its_prompt_is_tokenised_starts_nothing() -> None:
    reached, go_on = threading.Event(), threading.Event()

    class Slow(PreTrainedTokenizerFast):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            reached.set()
            assert go_on.wait(PATIENCE)
            return super().__call__(*args, **kwargs)

    def slow() -> PreTrainedTokenizerFast:
        tokenizer = byte_tokenizer()
        tokenizer.__class__ = Slow
        return tokenizer

    async def main() -> None:
        with watched(slow) as server:
            async with server.client() as client:
                goes = asyncio.create_task(read(client, {"prompt": "abc", "max_tokens": 20}))
                assert await asyncio.to_thread(reached.wait, PATIENCE)
                goes.cancel()
                await asyncio.gather(goes, return_exceptions=True)
            async with server.client() as client:  # it is answered after the other has gone
                health = await client.get("/health")
                go_on.set()
                server.executor.allow(None)
                again = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
            assert (health.status_code, again.status_code) == (200, 200)
            assert all(len(step.seqs) == 1 for step in server.executor.steps)
            assert len(server.executor.steps) == 2

    asyncio.run(main())


def test_long_texts_do_not_keep_short_ones_waiting() -> None:
    reached, go_on = threading.Event(), threading.Event()

    class Slow(PreTrainedTokenizerFast):
        def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
            if len(text) > 1000:
                reached.set()
                assert go_on.wait(PATIENCE)
            return super().__call__(text[:10], *args, **kwargs)

    def slow() -> PreTrainedTokenizerFast:
        tokenizer = byte_tokenizer()
        tokenizer.__class__ = Slow
        return tokenizer

    async def main() -> None:
        with watched(slow) as server:
            server.executor.allow(None)
            async with server.client() as client:
                text = "a" * 200_000
                many: list[asyncio.Task[httpx.Response]] = []
                for _ in range(20):  # more than the threads that all requests share
                    asked = {"prompt": text, "truncate_prompt_tokens": 5, "max_tokens": 2}
                    many.append(asyncio.create_task(client.post("/v1/completions", json=asked)))
                    asked = {"prompt": text}
                    many.append(asyncio.create_task(client.post("/tokenize", json=asked)))
                assert await asyncio.to_thread(reached.wait, PATIENCE)
                try:
                    short = await client.post("/v1/completions", json={"prompt": "x"}, timeout=20)
                finally:
                    go_on.set()
                assert short.status_code == 200
                assert {(await task).status_code for task in many} == {200}

    asyncio.run(main())


def test_a_swapped_out_request_of_a_client_that_leaves_is_dropped() -> None:
    async def main() -> None:
        # Two of 42 tokens do not fit into 12 blocks of 4: one of them is preempted.
        with watched(num_blocks=12, host_tier=True, recovery="swap") as server:
            async with server.client() as client:
                bodies = {c: {"prompt": c * 12, "max_tokens": 30, "stream": True} for c in "ab"}
                tasks = {c: asyncio.create_task(read(client, bodies[c])) for c in "ab"}
                await server.until(lambda: server.engine.num_live == 2)
                roster = server.core.scheduler.roster
                while not roster.swapped_out:
                    await server.step()
                    assert await asyncio.to_thread(
                        server.executor.reached.acquire, timeout=PATIENCE
                    )
                    server.executor.reached.release()
                [waiting] = [r for r in roster.requests.values() if r.order in roster.swapped_out]
                [gone] = [c for c in "ab" if waiting.prompt[0] == TOKENS(c)["input_ids"][0]]
                assert await held_after_two_steps(server, tasks.pop(gone).cancel) == 1
                assert not roster.swapped_out
                server.executor.allow(None)
                await tasks.popitem()[1]
        assert server.core.scheduler.manager.num_held_blocks == 0

    asyncio.run(main())


MARK = TOKENS("!")["input_ids"][0]


def marked(step: Step) -> np.ndarray:
    """Places in the step of a "!" that is the fourth token of a prompt."""
    return np.flatnonzero((step.tokens == MARK) & (step.positions == 3))


class Faulty(ToyExecutor):
    """Fails as it is told to, when a step computes what is `marked`."""

    def __init__(self, fault: Callable[[Step, Result], Result]) -> None:
        super().__init__(64, 4, vocab_size=VOCAB)
        self._fault = fault

    def submit(self, step: Step) -> Ticket:
        ticket = super().submit(step)
        if len(marked(step)):
            self._results[ticket] = self._fault(step, self._results[ticket])
        return ticket


def row_fault(step: Step, result: Result) -> Result:
    rows = np.searchsorted(np.cumsum(step.query_lens), marked(step), side="right")
    return replace(result, errors={int(row): "the sampler has failed" for row in rows})


def step_fault(step: Step, result: Result) -> Result:
    raise RuntimeError("the model has failed")


def damage(step: Step, result: Result) -> Result:
    raise SystemExit("the engine is gone")


async def together(url: str, *bodies: dict[str, Any]) -> list[httpx.Response]:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        return await asyncio.gather(*(client.post("/v1/completions", json=b) for b in bodies))


def texts(answer: httpx.Response) -> list[str]:
    return [choice["text"] for choice in answer.json()["choices"]]


GOOD = {"prompt": "good", "max_tokens": 12, "temperature": 0}
BAD = {"prompt": "bad!", "max_tokens": 12, "temperature": 0}


def test_a_fault_in_one_row_ends_that_request_and_leaves_the_others() -> None:
    with http_server() as url:
        (alone,) = asyncio.run(together(url, GOOD))
    with http_server(lambda: toy_core(executor=Faulty(row_fault))) as url:
        good, bad, streamed = asyncio.run(together(url, GOOD, BAD, {**BAD, "stream": True}))
        (after,) = asyncio.run(together(url, GOOD))
    assert texts(good) == texts(after) == texts(alone)
    assert bad.status_code == 500
    assert "the sampler has failed" in bad.json()["error"]["message"]
    assert streamed.status_code == 200
    assert '"error"' in streamed.text and "[DONE]" not in streamed.text


def test_a_fault_in_a_step_ends_its_requests_and_the_engine_goes_on() -> None:
    with http_server(lambda: toy_core(executor=Faulty(step_fault))) as url:
        (bad,) = asyncio.run(together(url, BAD))
        assert bad.status_code == 500
        assert "the model has failed" in bad.json()["error"]["message"]
        good, health, ready = (
            *asyncio.run(together(url, GOOD)),
            httpx.get(f"{url}/health"),
            httpx.get(f"{url}/ready"),
        )
        assert [a.status_code for a in (good, health, ready)] == [200] * 3


def test_an_engine_that_dies_says_so_everywhere() -> None:
    with http_server(lambda: toy_core(executor=Faulty(damage))) as url:
        bad, streamed = asyncio.run(together(url, BAD, {**BAD, "stream": True}))
        assert bad.status_code == 500 and "the engine is gone" in bad.text
        assert "the engine is gone" in streamed.text
        for path in ("/health", "/ready"):
            assert httpx.get(url + path).status_code == 503
        (after,) = asyncio.run(together(url, GOOD))
        assert after.status_code == 500


@pytest.mark.plants_faults
def test_a_damaged_pool_ends_the_engine() -> None:
    core = toy_core(executor=Faulty(step_fault))

    def damaged() -> None:
        raise InvariantError("block 3 is lost")

    core.scheduler.manager.check = damaged
    with pytest.raises(AssertionError, match="block 3 is lost"), http_server(lambda: core) as url:
        (bad,) = asyncio.run(together(url, BAD))
        assert bad.status_code == 500
        assert httpx.get(f"{url}/health").status_code == 503


def test_health_answers_while_a_step_runs() -> None:
    async def main() -> None:
        with watched() as server:
            async with server.client() as client:
                task = asyncio.create_task(client.post("/v1/completions", json=GOOD))
                assert await asyncio.to_thread(server.executor.reached.acquire, timeout=PATIENCE)
                now = server.engine.clock()
                assert (await client.get("/ready")).status_code == 200
                server.engine.clock = lambda: now + 61
                slow = await client.get("/ready")
                assert (slow.status_code, slow.json()["status"]) == (503, "slow")
                assert (await client.get("/health")).status_code == 200
                server.executor.allow(None)
                assert (await task).status_code == 200
                assert (await client.get("/ready")).status_code == 200

    asyncio.run(main())


def test_an_id_that_is_used_twice_is_no_matter() -> None:
    same = {**GOOD, "request_id": "x"}
    with http_server() as url:
        one, two = asyncio.run(together(url, same, same))
        (after,) = asyncio.run(together(url, same))
    assert texts(one) == texts(two) == texts(after)
    assert one.json()["id"] == two.json()["id"] == "cmpl-x"
