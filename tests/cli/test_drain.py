"""`pagedkv drain` against a server that is played."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from pagedkv.cli import drain
from pagedkv.cli.main import run


def worker(requests: int, stuck: str | None = None) -> dict[str, Any]:
    facts = {"name": "worker-0", "role": "both", "state": "draining", "stuck": stuck}
    counts = {"blocks": 64, "blocks_held": requests, "restarts": 0, "flips": 0}
    return {**facts, **counts, "requests": requests}


def test_an_idle_worker_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drain._Server, "ask", lambda *_: worker(0))
    assert run(["drain", "worker-0"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_undo_without_a_worker_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["drain", "--undo"]) == 2
    assert "--undo is of one worker: name it" in capsys.readouterr().err


def test_what_keeps_requests_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = [worker(3), worker(3), *[worker(2, "no room")] * 5, worker(2), worker(1, "gone")]
    answers: Iterator[dict[str, Any]] = iter([*states, worker(1, "gone"), worker(0)])

    def ask(server: object, method: str, path: str) -> Any:
        state = next(answers)
        return state if method == "POST" else [state]

    monkeypatch.setattr(drain._Server, "ask", ask)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert run(["drain", "worker-0"]) == 0
    lines = [line.partition("draining, ")[2] for line in capsys.readouterr().out.splitlines()]
    assert [(line[0], line.partition("requests stay: ")[2]) for line in lines] == [
        ("3", ""),
        ("2", "no room"),
        ("1", "gone"),
        ("0", ""),
    ]
