"""A server with workers, as users run it, and load for it whose answers are known."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from mixed_requests import Sample, Wanted, expected, mixed
from served import Served

from pagedkv.cache.survey import STATES
from pagedkv.engine.llm import LLM

# Seconds; reached only by a test that fails.
PATIENCE = 240.0
BLOCKS = 160
_FIELDS = (
    *("n", "temperature", "top_k", "seed", "max_tokens", "stop", "stop_token_ids"),
    "repetition_penalty",
)


class Clustered(Served):
    """`model`: the name by which clients ask."""

    def __init__(self, model: Path, *options: str) -> None:
        blocks = () if "--num-blocks" in options else ("--num-blocks", str(BLOCKS))
        super().__init__(model, "--deterministic", *blocks, *options)
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

    def metrics(self) -> dict[str, float]:
        """All series, by name with labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text
        return {name: float(value) for name, value in re.findall(r"^(\S+) (\S+)$", text, re.M)}

    def blocks(self) -> Counter[str]:
        """Blocks of all workers by state, each block looked at."""
        pool = httpx.get(f"{self.url}/dashboard/data", timeout=PATIENCE).json()["picture"]["pool"]
        return Counter(STATES[state] for state in b64decode(pool["states"]))

    def nothing_leaked(self) -> None:
        """When nothing runs: no block is held for anybody, and none is missing."""
        self.at_rest()
        blocks, total = self.blocks(), sum(w["blocks"] for w in self.workers().values())
        assert blocks["free"] + blocks["cached"] == blocks.total() == total, blocks

    def pid(self, name: str) -> int:
        """Of a worker, or of the "router"; waited for."""
        if name != "router":
            return int(self.workers()[name]["pid"])
        end = time.monotonic() + PATIENCE
        while True:
            children = descendants(self.process.pid)
            pids = {pid for pid in children if _title(pid) == "RouterActor"} - self._killed
            if pids:
                (pid,) = pids
                return pid
            assert time.monotonic() < end, self.log[-20:]

    def kill(self, pid: int) -> None:
        """kill -9."""
        self._killed.add(pid)
        os.kill(pid, signal.SIGKILL)

    def ask(self, request: dict[str, Any], seen: Callable[[int], None]) -> list[Sample]:
        """The samples of an answer that is streamed. seen: told how many tokens come."""
        tokens: list[tuple[int, ...]] = [()] * request["n"]
        texts, ends = [""] * request["n"], dict[int, tuple[Any, Any]]()
        wanted = {"model": self.model, "stream": True, "return_token_ids": True, **request}
        with (
            httpx.Client(base_url=self.url, timeout=PATIENCE) as client,
            client.stream("POST", "/v1/completions", json=wanted) as response,
        ):
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                piece = json.loads(line.removeprefix("data: "))
                assert "error" not in piece, piece
                for choice in piece["choices"]:
                    index = choice["index"]
                    assert index not in ends and "error" not in choice, choice
                    tokens[index] += tuple(choice["token_ids"])
                    texts[index] += choice["text"]
                    if choice["finish_reason"] is not None:
                        ends[index] = choice["finish_reason"], choice["stop_reason"]
                    seen(len(choice["token_ids"]))
        return [(tokens[i], texts[i], *ends[i]) for i in range(request["n"])]


@contextmanager
def clustered(model: Path, *options: str) -> Iterator[Clustered]:
    server = Clustered(model, *options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.signal(signal.SIGTERM)
        try:
            server.wait()
        finally:
            server.process.kill()


class Load:
    """Requests of many kinds, and what a single engine answers to them. clients: at once."""

    def __init__(
        self, model: Path, wanted: Wanted | None = None, clients: int = 6, **settings: Any
    ) -> None:
        self.wanted = mixed(14, 40, 110) if wanted is None else wanted
        self.requests = [
            {"prompt": text, **{name: getattr(params, name) for name in _FIELDS}}
            for text, params in self.wanted
        ]
        self._clients = clients
        llm = LLM(model, **{"num_blocks": BLOCKS, "deterministic": True, **settings})
        self.expected = expected(llm, self.wanted)
        tokenizer = llm.get_tokenizer()
        self.prompt_lengths = [len(tokenizer(text).input_ids) for text, _ in self.wanted]
        self.num_samples = sum(params.n for _, params in self.wanted)
        self.num_groups = sum(params.n > 1 for _, params in self.wanted)
        self.num_tokens = sum(len(s[0]) for samples in self.expected for s in samples)

    def moment(self, of: str) -> int:
        """A number of tokens before which something may happen, by chance; another for each."""
        return random.Random(of).randrange(1, self.num_tokens * 2 // 3)

    def run(
        self, server: Clustered, after: int = 0, then: Callable[[], None] = lambda: None
    ) -> list[list[Sample]]:
        """`then` is called as soon as so many tokens have come in all: streams are open then."""
        lock, came, done = threading.Lock(), [0] * len(self.requests), threading.Event()
        ended = [False] * len(self.requests)

        def ask(i: int) -> list[Sample]:
            def seen(tokens: int) -> None:
                with lock:
                    before = sum(came)
                    came[i] += tokens
                    now = before < after <= sum(came)
                    open_now = [n > 0 and not over for n, over in zip(came, ended, strict=True)]
                if now:
                    assert any(open_now)
                    then()
                    done.set()

            answer = server.ask(self.requests[i], seen)
            with lock:
                ended[i] = True
            return answer

        with ThreadPoolExecutor(self._clients) as pool:
            answers = list(pool.map(ask, range(len(self.requests))))
        assert done.is_set() or not after, f"{sum(came)} tokens have come, {after} were waited for"
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
