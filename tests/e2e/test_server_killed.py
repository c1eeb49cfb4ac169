"""A server that is killed under load: what the disk has acknowledged is found again, and right."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import PATIENCE, Served, served
from tiny_llm import save_tiny_llm

from pagedkv import LLM, SamplingParams

BLOCK_SIZE = 8


class Reading:
    """The tokens of a stream that have come."""

    def __init__(self, prompt: str) -> None:
        self.prompt, self.tokens = prompt, list[int]()

    async def read(self, client: httpx.AsyncClient, max_tokens: int) -> None:
        body = {
            "prompt": self.prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    self.tokens += choice["token_ids"]


async def figure(client: httpx.AsyncClient, name: str, **labels: str) -> int:
    page = (await client.get("/metrics")).text
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == f"pagedkv:{name}_total" and sample.labels == labels:
                return int(sample.value)
    raise AssertionError(page)


async def run_until_killed(
    server: Served, prompts: Sequence[str], max_tokens: int, enough: int
) -> tuple[list[Reading], int]:
    """What has come of each, and the blocks whose writes were acknowledged."""
    readings = [Reading(prompt) for prompt in prompts]
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
        tasks = [asyncio.create_task(r.read(client, max_tokens)) for r in readings]
        stored = 0
        while stored < enough or not all(r.tokens for r in readings):
            stored = await figure(client, "kv_blocks_stored")
        assert not any(task.done() for task in tasks)  # it is killed under load
        os.kill(server.core, signal.SIGKILL)
        server.signal(signal.SIGKILL)
        await asyncio.gather(*tasks, return_exceptions=True)
    return readings, stored


async def ask_again(server: Served, prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that are found on the disk of these prompts."""
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
        before = await figure(client, "prefix_cache_hits", tier="disk")
        for prompt in prompts:
            answer = await client.post(
                "/v1/completions", json={"prompt": list(prompt), "max_tokens": 1}
            )
            assert answer.status_code == 200
        return await figure(client, "prefix_cache_hits", tier="disk") - before


async def whole(server: Served, readings: Sequence[Reading], max_tokens: int) -> list[list[int]]:
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
        again = [Reading(r.prompt) for r in readings]
        await asyncio.gather(*(r.read(client, max_tokens) for r in again))
    return [r.tokens for r in again]


def killed_and_started_again(
    model: Path | str, folder: Path, prompts: Sequence[str], max_tokens: int, llm: dict[str, Any]
) -> None:
    options = [
        "--deterministic",
        "--write-through",
        *("--disk-tier", str(folder)),
        *("--block-size", str(BLOCK_SIZE)),
        *("--num-blocks", "512"),
        *("--max-model-len", "250"),
    ]
    with served(Path(model), *options) as server:
        readings, stored = asyncio.run(run_until_killed(server, prompts, max_tokens, len(prompts)))
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    outputs = LLM(model, deterministic=True, **llm).generate(list(prompts), params)
    expected = [list(output.outputs[0].token_ids) for output in outputs]
    with served(Path(model), *options) as server:
        # All there can be of each; the last token of a prompt is never looked up.
        known = [[*o.prompt_token_ids, *o.outputs[0].token_ids, 1] for o in outputs]
        found = asyncio.run(ask_again(server, known))
        assert found >= stored * BLOCK_SIZE
        assert asyncio.run(whole(server, readings, max_tokens)) == expected
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    for r, tokens in zip(readings, expected, strict=True):
        assert r.tokens == tokens[: len(r.tokens)]


def test_a_tiny_model(tmp_path: Path) -> None:
    save_tiny_llm(tmp_path / "model")
    prompts = [f"{i} is the number of this prompt" for i in range(6)]
    llm = {"num_blocks": 512, "block_size": BLOCK_SIZE, "max_model_len": 250}
    killed_and_started_again(tmp_path / "model", tmp_path / "tier", prompts, 200, llm)


@pytest.mark.deep
def test_the_embedded_model(tmp_path: Path) -> None:
    # Different from the first token on: what is found on the device is not looked for on the disk.
    prompts = [f"{i} is a number that is known for" for i in range(8)]
    llm = {"num_blocks": 512, "block_size": BLOCK_SIZE, "max_model_len": 250}
    killed_and_started_again("smollm2-135m-instruct", tmp_path, prompts, 60, llm)
