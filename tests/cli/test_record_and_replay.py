"""`generate --record` and `pagedkv simulate replay`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedkv.cli.main import run


@pytest.fixture
def recording(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "run"
    given = ["--model", model, "--num-blocks", "9", "--block-size", "2", "--max-tokens", "9"]
    assert run(["generate", "one", "two", *given, "--no-chat", "--record", str(path)]) == 0
    capsys.readouterr()
    return path


def test_a_recorded_run_is_replayed(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "replay", str(recording)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 requests, ") and "identical, block ids included\n" in out


def test_a_recording_can_be_explained(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", str(recording), "generate-1"]) == 0
    assert "preempted in step" in capsys.readouterr().out


@pytest.mark.plants_faults
def test_the_first_difference_is_printed(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = recording.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"kind":"preempt"' in line)
    entry = json.loads(lines[at])
    lines[at] = json.dumps(entry | {"freed": 99}, separators=(",", ":"))
    recording.write_text("\n".join(lines) + "\n")
    assert run(["simulate", "replay", str(recording)]) == 1
    out = capsys.readouterr().out
    assert f"line {at + 1}" in out and '"freed":99' in out and f'"freed":{entry["freed"]}' in out


def test_what_is_no_recording_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").write_text('{"format": "pagedkv decision log 1"}\n')
    assert run(["simulate", "replay", str(tmp_path / "other")]) == 2
    assert "line 1: no pagedkv recording 1" in capsys.readouterr().err


def test_a_recording_that_cannot_be_written_is_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing" / "run"
    assert run(["generate", "one", "--model", model, "--record", str(path)]) == 2
    assert "--record=" in capsys.readouterr().err


def test_requests_are_simulated_at_the_cost_of_a_recorded_run(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    given = ["--model", model, "--num-blocks", "64", "--max-tokens", "60", "--no-chat"]
    assert run(["generate", "one", "a prompt", *given, "--record", str(path)]) == 0
    capsys.readouterr()
    served = ["simulate", "serve", "--requests", "9", "--recording", str(path)]
    assert run([*served, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] > 0
    assert run([*served, "--step-ms", "5"]) == 2
    assert "--step-ms and --recording exclude each other" in capsys.readouterr().err
    assert run([*served, "--perf-table", str(path)]) == 2
    assert "--perf-table and --recording exclude each other" in capsys.readouterr().err
