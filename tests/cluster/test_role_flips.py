"""A side that has too few workers gets one of the other, and no answer changes."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
from clustered import PATIENCE, Clustered, Load, clustered
from mixed_requests import Wanted

from pagedkv.scheduling.params import SamplingParams


def roles(server: Clustered) -> Counter[str]:
    return Counter(worker["role"] for worker in server.workers().values())


def wanted(number: int, max_tokens: int) -> Wanted:
    return [
        (
            f"{'what is shared by some. ' if i % 2 else ''}request {i}",
            SamplingParams(temperature=0.0 if i % 3 else 0.9, seed=i, max_tokens=max_tokens),
        )
        for i in range(number)
    ]


def kill_the_prefill_worker(server: Clustered, few: Load, more: Load) -> None:
    """While few requests decode; more come at once."""
    (only,) = (w["name"] for w in server.workers().values() if w["role"] == "prefill")
    later: list[Future[object]] = []

    def kill() -> None:
        server.kill(server.pid(only))
        later.append(pool.submit(more.run, server))

    with ThreadPoolExecutor(1) as pool:
        assert few.run(server, 20, kill) == few.expected
        assert later[0].result() == more.expected


def test_the_side_that_starves_gets_the_worker(model: Path) -> None:
    """First many long answers: decode has no room. Then prefill has no worker, for it is killed:

    a decode worker takes its place, and gives away what it decodes.
    """
    workers = ("--prefill-workers", "2", "--decode-workers", "1", "--num-blocks", "96")
    end = time.monotonic() + PATIENCE
    with clustered(model, *workers, "--flip-roles-after", "0.1") as server:
        many = Load(model, wanted(24, 190), clients=24)
        while roles(server)["decode"] == 1:
            assert many.run(server) == many.expected
            assert time.monotonic() < end, (server.workers(), server.log)
        assert server.line("prefill -> decode")
        server.at_rest()
        few, more = Load(model, wanted(2, 190)), Load(model, wanted(3, 20))
        while roles(server)["prefill"] == 1:
            kill_the_prefill_worker(server, few, more)
            assert time.monotonic() < end, (server.workers(), server.log)
        assert server.line("decode -> prefill")
        server.at_rest()
        metrics = httpx.get(f"{server.url}/metrics").text
        flips = {name: worker["flips"] for name, worker in server.workers().items()}
        assert sum(flips.values()) >= 2
        for name, number in flips.items():
            assert f'pagedkv:worker_role_flips_total{{worker="{name}"}} {number}.0' in metrics
