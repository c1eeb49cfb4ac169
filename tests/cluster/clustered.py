"""A server with workers, as users run it, and load for it whose answers are known."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from served import Served

from pagedkv.engine.llm import LLM
from pagedkv.scheduling.params import SamplingParams

# Seconds; reached only by a test that fails.
PATIENCE = 240.0
# Characters of a load, before which something may happen to it. There are more.
MOST = 600
_SETTINGS = ("--num-blocks", "96", "--deterministic")


class Clustered(Served):
    """`model`: the name by which clients ask."""

    def __init__(self, model: Path, *options: str) -> None:
        super().__init__(model, *_SETTINGS, *options)
        self.model = str(model)
        self._killed: set[int] = set()

    def workers(self) -> dict[str, dict[str, Any]]:
        """How they are, by name."""
        answer = httpx.get(f"{self.url}/workers", timeout=PATIENCE)
        return {worker["name"]: worker for worker in answer.json()}

    def at_rest(self) -> None:
        """Waits until all workers are there, none as it was killed, and hold nothing."""
        end = time.monotonic() + PATIENCE
        while True:
            workers = self.workers().values()
            if all(
                w["state"] in ("ready", "draining")
                and w["pid"] not in self._killed
                and not w["requests"]
                and not w["blocks_held"]
                for w in workers
            ):
                return
            assert time.monotonic() < end, (list(workers), self.log[-20:])

    def kill(self, name: str) -> None:
        """kill -9 of a worker, or of the "router"."""
        if name == "router":
            pids = [pid for pid in descendants(self.process.pid) if _title(pid) == "RouterActor"]
            (pid,) = pids
        else:
            pid = self.workers()[name]["pid"]
        self._killed.add(pid)
        os.kill(pid, signal.SIGKILL)

    def ask(self, request: dict[str, Any], seen: Callable[[int], None]) -> tuple[str, str | None]:
        """The text of an answer that is streamed, and why it ended. seen: told how much comes."""
        text, reason = "", None
        with (
            httpx.Client(base_url=self.url, timeout=PATIENCE) as client,
            client.stream(
                "POST", "/v1/completions", json={"model": self.model, "stream": True, **request}
            ) as response,
        ):
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                piece = json.loads(line.removeprefix("data: "))
                assert "error" not in piece, piece
                for choice in piece["choices"]:
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
                    seen(len(choice["text"]))
        return text, reason


@contextmanager
def clustered(model: Path, *options: str) -> Iterator[Clustered]:
    server = Clustered(model, *options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.signal(signal.SIGTERM)
        server.wait()


class Load:
    """Requests, some of which share a beginning, and what a single engine answers to them."""

    def __init__(self, model: Path, number: int = 8, max_tokens: int = 190) -> None:
        self.requests = [
            {
                "prompt": f"{'what is shared by some. ' if i % 2 else ''}request {i}",
                "max_tokens": max_tokens,
                "temperature": 0.0 if i % 3 else 0.9,
                "seed": i,
            }
            for i in range(number)
        ]
        llm = LLM(model, num_blocks=96, deterministic=True)
        outputs = llm.generate(
            [str(request["prompt"]) for request in self.requests],
            [
                SamplingParams(
                    max_tokens=max_tokens, temperature=request["temperature"], seed=request["seed"]
                )
                for request in self.requests
            ],
        )
        self.expected = [
            (output.outputs[0].text, output.outputs[0].finish_reason) for output in outputs
        ]

    def run(
        self, server: Clustered, after: int = 0, then: Callable[[], None] = lambda: None
    ) -> Sequence[tuple[str, str | None]]:
        """All at once; `then` is called as soon as so many characters have come in all."""
        came, lock, done = 0, threading.Lock(), threading.Event()

        def seen(characters: int) -> None:
            nonlocal came
            with lock:
                before, came = came, came + characters
                now = before < after <= came
            if now:
                then()
                done.set()

        with ThreadPoolExecutor(len(self.requests)) as pool:
            answers = list(pool.map(lambda request: server.ask(request, seen), self.requests))
        assert done.is_set() or not after, f"{came} characters have come, {after} were waited for"
        return answers


def descendants(pid: int) -> list[int]:
    """Of a process, whatever their depth."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text() if entry.name.isdigit() else ""
        except OSError:  # it has ended
            continue
        if stat:
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found: list[int] = []
    new = [pid]
    while new:
        new = [child for one in new for child in children.get(one, [])]
        found += new
    return found


def _title(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    except OSError:
        return ""
    return line.strip().removeprefix("ray::").partition(".")[0]
