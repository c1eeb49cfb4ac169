"""A server as users run it: `pagedkv serve`, a process with a core in another one."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAIN = "from pagedkv.cli.main import main; main()"
PATIENCE = 120.0  # seconds; reached only by a test that fails


class Served:
    """`url`; `log`: the lines of its standard error so far."""

    def __init__(self, model: Path, *options: str) -> None:
        command = [sys.executable, "-c", _MAIN, "serve", str(model), "--port", "0"]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [*command, *options], stderr=subprocess.PIPE, text=True, env=environment
        )
        self.log: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def url(self) -> str:
        return "http://" + self.line("serving ").rpartition("http://")[2]

    @property
    def core(self) -> int:
        """Id of the core's process."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return next(int(child) for child in children if _is_core(int(child)))

    def line(self, text: str) -> str:
        """The first line with this text, waited for."""
        with self._changed:
            self._changed.wait_for(lambda: self._find(text) is not None or self._ended, PATIENCE)
            found = self._find(text)
        assert found is not None, f"no line with {text!r} in:\n" + "\n".join(self.log)
        return found

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit status."""
        status = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return status

    def _find(self, text: str) -> str | None:
        return next((line for line in self.log if text in line), None)

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                with self._changed:
                    self.log.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _is_core(pid: int) -> bool:
    return b"core_process" in Path(f"/proc/{pid}/cmdline").read_bytes()


@contextmanager
def served(model: Path, *options: str) -> Iterator[Served]:
    """Ended at the end, if it has not ended."""
    server = Served(model, *options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGKILL)
        server.wait()


def ended(pid: int) -> None:
    """Waits until a process that is not our child has ended."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ready, _, _ = select.select([watched], [], [], PATIENCE)
    os.close(watched)
    assert ready, f"process {pid} goes on"
