"""Requests as streams: text, cancelling, a core that dies."""

from __future__ import annotations

import asyncio

import pytest
from serving import GatedExecutor, running, toy_core
from tiny_llm import VOCAB

from pagedkv.engine.toy import ToyExecutor
from pagedkv.errors import EngineDeadError, RequestError
from pagedkv.scheduling.params import SamplingParams
from pagedkv.server.async_engine import AsyncEngine, Stream

PARAMS = SamplingParams(temperature=0.0, max_tokens=6)


def submit(engine: AsyncEngine, prompt: str, params: SamplingParams = PARAMS) -> Stream:
    name = engine.new_id("test")
    return engine.submit(engine.front.reader.read(name, prompt, params, arrival=engine.clock()))


async def text(stream: Stream) -> str:
    async for output in stream:
        last = output
    assert last.finished
    return last.outputs[0].text


def gated() -> GatedExecutor:
    return GatedExecutor(ToyExecutor(64, 4, vocab_size=VOCAB))


def test_streams_end_with_the_text_of_a_solo_run() -> None:
    async def solo(prompt: str) -> str:
        async with running() as engine:
            return await text(submit(engine, prompt))

    async def all_at_once(prompts: list[str]) -> list[str]:
        async with running() as engine:
            return list(await asyncio.gather(*(text(submit(engine, p)) for p in prompts)))

    prompts = ["one", "two", "three and more"]
    together = asyncio.run(all_at_once(prompts))
    assert together == [asyncio.run(solo(prompt)) for prompt in prompts]


def test_a_request_that_the_core_cannot_read_ends_with_all_its_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(add: object, now: float) -> list[object]:
        raise RuntimeError("boom")

    async def main() -> None:
        core = toy_core()
        monkeypatch.setattr(core.scheduler, "add", broken)
        async with running(lambda: core) as engine, asyncio.timeout(60):
            *_, last = [o async for o in submit(engine, "x", SamplingParams(n=2))]
            assert last.finished and engine.num_live == 0
            assert ["boom" in str(sample.error) for sample in last.outputs] == [True, True]

    asyncio.run(main())


def test_a_cancelled_request_leaves_its_blocks_within_two_steps() -> None:
    async def main() -> None:
        executor = gated()
        core = toy_core(executor=executor)
        async with running(lambda: core) as engine:
            gone = submit(engine, "to be cancelled", SamplingParams(max_tokens=40))
            stays = submit(engine, "stays")
            await asyncio.to_thread(executor.reached.acquire)
            engine.cancel(gone)
            taken: list[int] = []
            engine.watchers.append(lambda batch: taken.append(len(core.scheduler)))
            executor.allow(2)
            while len(taken) < 2:
                await asyncio.sleep(0)
            assert taken[-1] == 1
            executor.allow(None)
            await text(stays)
        assert core.scheduler.manager.num_held_blocks == 0

    asyncio.run(main())


def test_a_core_that_dies_ends_every_stream_with_an_error() -> None:
    class Broken(ToyExecutor):
        def submit(self, step):
            raise SystemExit("the model is gone")

    async def main() -> None:
        core = toy_core(executor=Broken(64, 4, vocab_size=VOCAB))
        async with running(lambda: core) as engine:
            streams = [submit(engine, "one"), submit(engine, "two")]
            for stream in streams:
                with pytest.raises(EngineDeadError, match="the model is gone"):
                    await text(stream)
            assert engine.dead is not None and engine.num_live == 0
            with pytest.raises(EngineDeadError):
                submit(engine, "three")
            with pytest.raises(EngineDeadError):
                await engine.ask("explain", "x")

    asyncio.run(main())


def test_questions_are_answered_between_steps() -> None:
    async def main() -> None:
        async with running() as engine:
            stream = submit(engine, "one")
            await text(stream)
            assert stream.request_id in await engine.ask("explain", stream.request_id)
            with pytest.raises(LookupError, match="nothing is known of 'weather'"):
                await engine.ask("weather")
            with pytest.raises(LookupError, match="RequestError"):
                await engine.ask("explain", "nobody")

    asyncio.run(main())


def test_a_slow_reader_gets_the_newest_output_only() -> None:
    async def main() -> None:
        async with running() as engine:
            stream = submit(engine, "one")
            await engine.ended()
            outputs = [output async for output in stream]
            assert len(outputs) == 1 and len(outputs[0].outputs[0].token_ids) == 6

    asyncio.run(main())


def test_what_cannot_run_is_refused_before_anything_is_sent() -> None:
    async def main() -> None:
        async with running() as engine:
            with pytest.raises(RequestError, match="max_model_len=64"):
                submit(engine, "x" * 64)
            assert engine.num_live == 0

    asyncio.run(main())
