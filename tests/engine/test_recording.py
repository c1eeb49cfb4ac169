"""What a Recorder writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.cache import BlockManager, Misuse, SanitizerError
from pagedkv.engine.core import EngineCore
from pagedkv.engine.recording import Recorder
from pagedkv.engine.toy import ToyExecutor
from pagedkv.errors import ConfigError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.messages import Abort, Add, Drain
from pagedkv.scheduling.params import SamplingParams
from pagedkv.scheduling.scheduler import Scheduler


def make_core(path: Path) -> tuple[EngineCore, Recorder]:
    scheduler = Scheduler(BlockManager(16, 4, max_seqs=8), SchedulerConfig(8, 16, 64))
    recorder = Recorder(path, scheduler)
    return EngineCore(scheduler, ToyExecutor(16, 4), recorder), recorder


def add(name: str, prompt: Any = (1, 2, 3)) -> Add:
    return Add(name, prompt, SamplingParams(temperature=0.0, max_tokens=2), 0.0, 0)


def names(path: Path) -> list[str]:
    """Of every line after the first."""
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return [line.get("kind") or next(iter(line)) for line in lines]


def test_inputs_and_decisions_are_written_in_order(tmp_path: Path) -> None:
    core, recorder = make_core(tmp_path / "run")
    core.send(add("a"))
    core.send(Abort("b"))
    core.send(Drain())
    core.step(1.5)
    core.reset_prefix_cache()
    core.step(2.5)
    recorder.close()
    assert names(tmp_path / "run") == [
        *("settings", "at", "Add", "arrive", "Abort", "Drain", "admit", "chunk", "step", "result"),
        *("reset_cache", "at", "step", "result", "end", "end", "cost"),
    ]


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ValueError("bad"), {"kind": "error", "type": "ValueError", "text": "bad"}),
        (
            KeyboardInterrupt("now"),
            {"kind": "interrupt", "type": "KeyboardInterrupt", "text": "KeyboardInterrupt('now')"},
        ),
        (
            SanitizerError(next(iter(Misuse)), "a report", 1, 2, 3),
            {"kind": "sanitizer", "type": "SanitizerError", "text": "a report"},
        ),
    ],
)
def test_failures_are_told_apart(
    error: BaseException, failure: dict[str, str], tmp_path: Path, monkeypatch: Any
) -> None:
    core, _ = make_core(tmp_path / "run")

    def fail(step: object) -> None:
        raise error

    monkeypatch.setattr(core.executor, "submit", fail)
    core.send(add("a"))
    if isinstance(error, ValueError):
        core.step(0.0)
    else:
        with pytest.raises(type(error)):
            core.step(0.0)
        core.step(0.0)
    lines = [json.loads(line) for line in (tmp_path / "run").read_text().splitlines()]
    assert [line["failure"] for line in lines if "failure" in line] == [failure]


def test_what_cannot_be_written_ends_the_recording_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    core, recorder = make_core(tmp_path / "run")
    core.send(add("odd", prompt=(object(),)))
    core.send(add("a", prompt=tuple(np.arange(3))))
    ends = []
    while core.has_unfinished():
        ends += [d.finish_reason for d in core.step(0.0)[0] if d.finish_reason]
    recorder.close()
    assert ends == ["error", "length"]
    assert "Add cannot be recorded and is the end of it" in caplog.text
    assert names(tmp_path / "run") == ["settings", "at"]


def test_numbers_of_numpy_can_be_written(tmp_path: Path) -> None:
    core, _ = make_core(tmp_path / "run")
    core.send(add("a", prompt=tuple(np.arange(3))))
    core.step(np.float64(1.0))
    assert names(tmp_path / "run").count("result") == 1
    core.send(Abort("a"))
    core.step(2.0)


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record=.*cannot be written"):
        make_core(tmp_path / "missing" / "run")
