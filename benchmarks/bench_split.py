"""What a burst of long prompts does to those who are reading: one process, or prefill apart.

Run: python benchmarks/bench_split.py

A few requests decode all the time; then a burst of long prompts comes, each of which asks for one
token. Printed: P99 of the gaps between the tokens of those that decode, quiet and during the burst,
with one engine on all cores, and with a prefill and a decode worker, each on a core of its own.
With the split it is to rise by less than 1.3x.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv.cluster.actors import Plan
from pagedkv.cluster.link import ClusterLink
from pagedkv.scheduling.params import SamplingParams
from pagedkv.server.async_engine import AsyncEngine
from pagedkv.server.serve import tokenizer_of

BAR = 1.3


def pin(pid: int, core: int) -> None:
    """All threads of a process to one core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


async def measure(roles: dict[str, Any], given: argparse.Namespace) -> tuple[float, float]:
    """P99 of the gaps between tokens in seconds: quiet, and during the burst."""
    arguments = {"model": given.model, "num_blocks": given.blocks}
    link = ClusterLink(Plan(roles, arguments))
    engine = AsyncEngine(link, tokenizer_of)
    await engine.start()
    try:
        workers = await engine.ask("workers")
        cores = sorted(os.sched_getaffinity(0))
        if len(workers) > 1:
            for i, worker in enumerate(workers):
                pin(worker["pid"], cores[i % len(cores)])
        return await _load(engine, given)
    finally:
        await engine.close()


async def _load(engine: AsyncEngine, given: argparse.Namespace) -> tuple[float, float]:
    rng = np.random.default_rng(given.seed)
    times: list[list[float]] = [[] for _ in range(given.decodes)]

    def submit(name: str, length: int, max_tokens: int) -> Any:
        prompt = {"prompt_token_ids": rng.integers(100, 10_000, length).tolist()}
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        reader = engine.front.reader
        prepared = reader.read(engine.new_id(name), prompt, params, arrival=engine.clock())
        return engine.submit(prepared)

    async def decode(i: int) -> None:
        async for _ in submit("decode", 32, given.tokens):
            times[i].append(time.monotonic())

    async def first_token() -> None:
        async for _ in submit("burst", given.prompt_len, 1):
            pass

    decoding = [asyncio.create_task(decode(i)) for i in range(given.decodes)]
    while min(map(len, times)) < given.tokens // 3:
        await asyncio.sleep(0.01)
    began = time.monotonic()
    await asyncio.gather(*(first_token() for _ in range(given.burst)))
    ended = time.monotonic()
    for task in decoding:
        task.cancel()
    await asyncio.gather(*decoding, return_exceptions=True)
    quiet = [g for one in times for g, at in _gaps(one) if at < began][given.decodes :]
    during = [g for one in times for g, at in _gaps(one) if began <= at <= ended]
    return float(np.quantile(quiet, 0.99)), float(np.quantile(during, 0.99))


def _gaps(times: list[float]) -> list[tuple[float, float]]:
    return [(b - a, b) for a, b in itertools.pairwise(times[4:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--blocks", type=int, default=1024)
    parser.add_argument("--decodes", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--burst", type=int, default=6)
    parser.add_argument("--prompt-len", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name, roles in (
        ("one process", {"worker-0": "both"}),
        ("prefill apart from decode", {"prefill-0": "prefill", "decode-0": "decode"}),
    ):
        quiet, during = asyncio.run(measure(roles, given))
        print(
            f"{name}: P99 between tokens {1e3 * quiet:.1f} ms quiet, {1e3 * during:.1f} ms in the "
            f"burst: {during / quiet:.2f}x"
        )
    print(f"bar: less than {BAR}x with the split")


if __name__ == "__main__":
    main()
