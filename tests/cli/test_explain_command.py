"""`--decision-log` and `pagedkv explain`."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedkv.cli.main import run


@pytest.fixture
def log(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The log of three prompts, one seat."""
    path = tmp_path / "decisions"
    given = ["--model", model, "--num-blocks", "64", "--max-tokens", "5", "--no-chat"]
    given += ["--max-num-seqs", "1", "--decision-log", str(path)]
    assert run(["generate", "one", "two", "three", *given]) == 0
    capsys.readouterr()
    return path


def test_a_run_is_explained(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", str(log), "generate-1"]) == 0
    out = capsys.readouterr().out
    assert "request generate-1#1" in out and "waited for a seat in 5 plans" in out
    assert "ended: length after 5 tokens" in out


def test_unknown_requests_are_refused(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", str(log), "generate-9"]) == 2
    assert "'generate-9' is not in the decision log" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 3: no JSON"),
        ('{"step":0}', "line 3: 'step' or 'now' is missing"),
        ('{"step":0,"now":0,"kind":"admit","request":"a"}', "line 3: the numbers of 'admit'"),
    ],
)
def test_malformed_lines_are_named(
    line: str, message: str, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:2], line + "\n", *lines[2:]]))
    assert run(["explain", str(log), "generate-1"]) == 2
    assert message in capsys.readouterr().err


def test_a_log_that_cannot_be_written_is_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing" / "log"
    assert run(["generate", "one", "--model", model, "--decision-log", str(path)]) == 2
    assert "--decision-log=" in capsys.readouterr().err
