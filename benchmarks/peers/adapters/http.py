"""Servers on this machine: starting one, and many requests to it at once."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

HOST = "127.0.0.1"
PATIENCE = 300.0  # seconds for a server to start


class Server:
    """A server that has started. command: without its address; `--host` and `--port` are added."""

    def __init__(self, command: Sequence[str]) -> None:
        with socket.create_server((HOST, 0)) as free:
            self._port = free.getsockname()[1]
        self._process = subprocess.Popen(
            [*command, "--host", HOST, "--port", str(self._port)], stdout=subprocess.DEVNULL
        )
        self.pid = self._process.pid
        self._workers = ThreadPoolExecutor(64)
        end = time.monotonic() + PATIENCE
        while not self._healthy():
            ended = self._process.poll()
            if ended is not None or time.monotonic() > end:
                self.close()
                why = f"no answer within {PATIENCE:.0f} s" if ended is None else f"status {ended}"
                raise SystemExit(f"{command[0]} did not start: {why}")
            time.sleep(0.1)

    def post(self, path: str, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        """The answers, in order, to requests that are all sent at once; not streamed."""
        return list(self._workers.map(lambda body: self._ask("POST", path, body), bodies))

    def close(self) -> None:
        self._workers.shutdown()
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _healthy(self) -> bool:
        try:
            self._ask("GET", "/health")
        except (OSError, http.client.HTTPException):
            return False
        return True

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        connection = http.client.HTTPConnection(HOST, self._port)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            if response.status != 200:
                raise http.client.HTTPException(f"{response.status}: {text[:500]!r}")
            return json.loads(text)
        finally:
            connection.close()
