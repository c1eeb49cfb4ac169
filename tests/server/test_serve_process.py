"""`pagedkv serve` as a process: how it starts and how it ends.

A core that is stopped (SIGSTOP) stands for a step of any length.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from served import PATIENCE, Served, ended, served

from pagedkv.errors import ConfigError
from pagedkv.server.serve import run
from pagedkv.server.settings import EngineSettings, ServerSettings, ServeSettings


class Reading:
    """A stream of a completion, of which the first piece has come."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.iter_lines()
        self.first = next(self._lines)

    def rest(self) -> list[str]:
        return [line for line in self._lines if line]


@contextmanager
def reading(server: Served, model: Path, max_tokens: int = 200) -> Iterator[Reading]:
    asked = {"model": str(model), "prompt": "a b c", "max_tokens": max_tokens, "stream": True}
    with (
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
        client.stream("POST", "/v1/completions", json=asked) as response,
    ):
        yield Reading(response)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process computes nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def ask(server: Served, model: Path) -> httpx.Response:
    asked = {"model": str(model), "prompt": "x", "max_tokens": 2}
    return httpx.post(f"{server.url}/v1/completions", json=asked, timeout=PATIENCE)


def test_it_says_what_it_runs_and_where(model: Path) -> None:
    with served(model) as server:
        assert "127.0.0.1:" in server.url
        server.line("loading ")
        server.line("KV cache:")
        assert ask(server, model).status_code == 200
        core = server.core
        server.signal(signal.SIGINT)
        assert server.wait() == 0
        ended(core)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_runs_finish_and_nothing_new_in(
    model: Path, number: signal.Signals
) -> None:
    with served(model) as server, reading(server, model) as one, reading(server, model) as two:
        with stopped(server.core):
            server.signal(number)
            server.line("shutting down")
            refused = ask(server, model)
            ready = httpx.get(f"{server.url}/ready")
            health = httpx.get(f"{server.url}/health")
        assert (refused.status_code, ready.status_code, health.status_code) == (503, 503, 200)
        assert "shutting down" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        for stream in (one, two):
            assert stream.rest()[-1] == "data: [DONE]"
        assert server.wait() == 0


def test_what_does_not_end_in_time_gets_an_error(model: Path) -> None:
    with served(model, "--drain-timeout", "0") as server, reading(server, model) as stream:
        core = server.core
        with stopped(core):
            server.signal(signal.SIGTERM)
            last = [line for line in stream.rest() if line != "data: [DONE]"][-1]
        assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert server.wait() == 0
        ended(core)


def test_a_second_signal_ends_at_once(model: Path) -> None:
    with served(model) as server, reading(server, model) as stream:
        core = server.core
        with stopped(core):
            server.signal(signal.SIGTERM)
            server.line("shutting down")
            server.signal(signal.SIGTERM)
            assert server.wait() == 128 + signal.SIGTERM
            with pytest.raises(httpx.RemoteProtocolError):
                stream.rest()
            ended(core)


def test_a_server_that_is_killed_leaves_no_core(model: Path) -> None:
    with served(model) as server, reading(server, model):
        core = server.core
        server.signal(signal.SIGKILL)
        ended(core)


def test_a_core_that_is_killed_ends_every_request_and_the_server(model: Path) -> None:
    with served(model) as server, reading(server, model) as stream:
        with stopped(server.core):
            os.kill(server.core, signal.SIGKILL)
            last = [line for line in stream.rest() if line != "data: [DONE]"][-1]
        assert "signal 9" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert server.wait() == 1


def test_a_slow_step_makes_it_not_ready_and_is_reported(model: Path) -> None:
    with served(model, "--watchdog-after", "0.05") as server, reading(server, model) as stream:
        with stopped(server.core):
            ready = httpx.get(f"{server.url}/ready")
            while ready.status_code == 200:  # for 0.05 seconds at most
                ready = httpx.get(f"{server.url}/ready")
            assert ready.status_code == 503 and ready.json()["status"] == "slow"
            assert httpx.get(f"{server.url}/health").status_code == 200
        stream.rest()
        assert httpx.get(f"{server.url}/ready").status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    with served(tmp_path / "nothing") as server:
        assert server.wait() == 2
        loading, why = server.log
        assert loading == f"INFO:     loading {tmp_path / 'nothing'}"
        assert why.startswith("pagedkv: ") and str(tmp_path) in why


def test_a_port_in_use_is_one_line_before_a_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with served(tmp_path / "nothing", "--port", port) as server:
            assert server.wait() == 2
            assert len(server.log) == 1 and f"port={port}" in server.log[0]


def test_a_signal_while_the_model_is_loaded_leaves_nothing(model: Path) -> None:
    with served(model) as server:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        while not (core := children.read_text().split()):
            assert server.process.poll() is None
        server.signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM
        ended(int(core[0]))


@pytest.mark.parametrize("host", ["a\0b", "999.1.1.1", "a..b"])
def test_an_address_that_is_none_is_one_line(model: Path, host: str) -> None:
    given = ServeSettings(server=ServerSettings(host=host), engine=EngineSettings(model=str(model)))
    with pytest.raises(ConfigError, match="cannot listen at host="):
        run(given)


def test_more_connections_than_descriptors_are_told_of_once(model: Path) -> None:
    with served(model) as server, ExitStack() as clients:
        port = int(server.url.rpartition(":")[2])
        pid = server.process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        few = len(os.listdir(f"/proc/{pid}/fd")) + 2
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (few, limits[1]))
        for _ in range(8):
            clients.enter_context(socket.create_connection(("127.0.0.1", port)))
        server.line("no file descriptor is left")
        clients.close()
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    assert len([line for line in server.log if "descriptor" in line or "accept" in line]) == 1
