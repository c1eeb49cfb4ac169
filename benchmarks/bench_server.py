"""Does the server stay in reach under load, and what does it cost beside the model's own work?

Both with the embedded model; front, core, load generator and this script are four processes.

1. `pagedkv serve` with STREAMS streams at once, from `pagedkv bench serve`. Meanwhile /health is
   asked every 50 ms, whether it has answered or not: percentiles, and how many streams failed.
2. OVERHEAD streams: CPU time of front and core outside of the executor, as a share of the
   executor's. By CPU clocks, which other work on the machine does not move: the executor has all
   threads of the core but its first (they run kernels, or wait actively for the next) and, of the
   first, what its clock has counted inside of `submit` and `collect`.

`python bench_server.py [STREAMS [OVERHEAD [OUTPUT_TOKENS]]]`
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from fastapi import FastAPI

from calibration import print_calibration
from pagedkv.engine import core_loop
from pagedkv.engine.core import EngineCore
from pagedkv.engine.executor import ModelExecutor
from pagedkv.server import core_process, serve
from pagedkv.server.async_engine import AsyncEngine
from pagedkv.server.settings import ServeSettings

MODEL = "smollm2-135m-instruct"
POOL = {"num_blocks": 4096, "max_num_seqs": 256}
PATIENCE = 120.0  # seconds for a server to start
TOOL = [sys.executable, "-c", "from pagedkv.cli.main import main; main()"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


@contextmanager
def server(command: list[str], url: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                get(f"{url}/health")
                break
            except (urllib.error.URLError, ConnectionError) as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the server did not start") from error
                time.sleep(0.2)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def load(url: str, streams: int, output: int) -> subprocess.Popen[bytes]:
    command = [*TOOL, "bench", "serve", "--base-url", url, "--num-prompts", str(streams)]
    command += ["--input-len", "64", "--output-len", str(output), "--ignore-eos", "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def result_of(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(process.communicate()[0])
    return result


def health_under_load(streams: int, output: int) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [*TOOL, "serve", MODEL, "--port", str(port)]
    for name, value in POOL.items():
        command += [f"--{name.replace('_', '-')}", str(value)]

    def ask() -> float:
        start = time.monotonic()
        get(f"{url}/health")
        return time.monotonic() - start

    # Threads enough that an answer that takes its time delays no other question.
    with server(command, url), ThreadPoolExecutor(64) as pool:
        loading = load(url, streams, output)
        asked = []
        while loading.poll() is None:
            asked.append(pool.submit(ask))
            time.sleep(0.05)
        result = result_of(loading)
        times = np.array([question.result() for question in asked]) * 1e3
    print(
        f"{streams} streams of {output} tokens: {result['completed']} completed, "
        f"{result['failed']} failed {result['failures'] or ''}; "
        f"{result['output_throughput']:.0f} tokens/s, at most "
        f"{result['max_concurrent_requests']} at once, generator kept up: "
        f"{result['generator_kept_up']}"
    )
    p50, p99 = np.percentile(times, (50, 99))
    print(
        f"  /health meanwhile, {len(times)} times: P50 {p50:.1f} ms, P99 {p99:.1f} ms, "
        f"at most {times.max():.1f} ms (aim: P99 below 100 ms)"
    )


def overhead(streams: int, output: int) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with server([sys.executable, __file__, "--measured-server", str(port)], url):
        result_of(load(url, streams, 4))  # everything has been used once
        before = get(f"{url}/measured")
        result = result_of(load(url, streams, output))
        after = get(f"{url}/measured")
    spent = {name: after[name] - before[name] for name in before}
    inside, tokens = spent["executor"], result["total_output_tokens"]
    print(
        f"{streams} streams of {output} tokens, {result['failed']} failed: "
        f"{spent['steps']} steps, {result['output_throughput']:.0f} tokens/s"
    )
    each = ", ".join(
        f"{name} {spent[name] / tokens * 1e3:.3f} ms ({spent[name] / inside:.1%})"
        for name in ("front", "core", "executor")
    )
    outside = (spent["front"] + spent["core"]) / inside
    print(f"  CPU time of a token: {each}")
    print(f"  outside of the executor: {outside:.1%} of the executor's (aim: at most 10 %)")


def measured_server(port: int) -> int:
    """`pagedkv serve` with one more route: CPU seconds so far of front and core."""
    make_app = serve.create_app

    def with_clocks(engine: AsyncEngine, settings: ServeSettings) -> FastAPI:
        app = make_app(engine, settings)

        @app.get("/measured")
        async def measured() -> dict[str, float]:
            core: dict[str, float] = await engine.ask("cpu")
            return {"front": time.process_time(), **core}

        return app

    serve.create_app = with_clocks
    program = (sys.executable, __file__, "--measured-core")
    serve.ProcessLink = partial(serve.ProcessLink, program=program)
    settings = {
        "server": {"port": port, "log_level": "warning"},
        "engine": {"model": MODEL, **POOL},
    }
    return serve.run(ServeSettings.model_validate(settings))


def measured_core() -> int:
    """The core's own process, with a clock around the executor and an answer that reads it."""
    inside, steps = 0.0, 0

    def clocked(method: Callable[..., Any], step: int) -> Callable[..., Any]:
        def call(executor: ModelExecutor, argument: Any) -> Any:
            nonlocal inside, steps
            start = time.thread_time()
            try:
                return method(executor, argument)
            finally:
                inside, steps = inside + time.thread_time() - start, steps + step

        return call

    def cpu(core: EngineCore, argument: str) -> dict[str, float]:
        first = time.thread_time()
        executor = time.process_time() - first + inside
        return {"executor": executor, "core": first - inside, "steps": steps}

    ModelExecutor.submit = clocked(ModelExecutor.submit, 1)
    ModelExecutor.collect = clocked(ModelExecutor.collect, 0)
    core_loop.ANSWERS = {**core_loop.ANSWERS, "cpu": cpu}
    return core_process.main()


def main() -> None:
    if sys.argv[1:2] == ["--measured-server"]:
        sys.exit(measured_server(int(sys.argv[2])))
    if sys.argv[1:2] == ["--measured-core"]:
        del sys.argv[1]
        os._exit(measured_core())
    given = [int(number) for number in sys.argv[1:]]
    streams, few, output = [*given, *(200, 32, 32)[len(given) :]]
    print_calibration()
    health_under_load(streams, output)
    overhead(few, output)


if __name__ == "__main__":
    main()
