"""Engines in processes of their own, as the driver sees them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from peers.protocol import cpu_seconds, family
from peers.workloads import Request

BENCHMARKS = Path(__file__).parents[1]
LAST_LINES = 3  # of what a process that died has written


class EngineDied(Exception):
    """An engine's process has ended, or does not answer; with the last it had to say."""


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """One way to run an engine.

    module: the adapter, such as "peers.adapters.vllm"; options go to it.
    python: the interpreter that has the engine. environment: variables that it needs beside ours.
    workloads: names of those that the setting is for; None: all.
    """

    engine: str
    name: str
    module: str
    python: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    workloads: frozenset[str] | None = None

    def runs(self, workload: str) -> bool:
        return self.workloads is None or workload in self.workloads

    def __str__(self) -> str:
        return f"{self.engine}, {self.name}"


class EngineProcess:
    """An engine that has been started and waits for work. A context manager; ends with it.

    patience: seconds that it may take to start, or for one run.
    EngineDied: it did not start.
    """

    def __init__(self, setting: Setting, patience: float = 900.0) -> None:
        self.setting, self._patience = setting, patience
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        variables = {**os.environ, "PYTHONPATH": str(BENCHMARKS), **setting.environment}
        self._process = subprocess.Popen(
            [setting.python, "-m", setting.module, json.dumps(dict(setting.options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=variables,
            cwd=tempfile.gettempdir(),
        )
        try:
            self.info: dict[str, str] = self._answer()["ready"]
        except BaseException:
            self.close()
            raise

    def run(self, workload: str, requests: list[Request]) -> dict[str, Any]:
        """What `protocol.measure` gives. EngineDied: it gives nothing any more.

        ValueError: an output has not the length that was asked for.
        """
        assert self._process.stdin is not None
        message = json.dumps({"workload": workload, "requests": requests})
        try:
            self._process.stdin.write(message.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineDied(self._last_words()) from error
        answer = self._answer()
        given = [len(tokens) for tokens in answer["tokens"]]
        wanted = [output for _, output in requests]
        if given != wanted:
            raise ValueError(f"{self.setting}: outputs of {given} tokens, {wanted} were asked for")
        return answer

    def cpu_seconds(self) -> float:
        """CPU time so far, of its children too."""
        try:
            return cpu_seconds(family(self._process.pid))
        except FileNotFoundError:  # one of them has just ended
            return 0.0

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has died
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        out = self._process.stdout
        assert out is not None
        # One line at a time is asked for, so none waits in the buffer.
        if not select.select([out], [], [], self._patience)[0]:
            raise EngineDied(f"no answer within {self._patience:.0f} s; {self._last_words()}")
        line = out.readline()
        if not line:
            raise EngineDied(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return " | ".join(lines[-LAST_LINES:]) or "it said nothing"
