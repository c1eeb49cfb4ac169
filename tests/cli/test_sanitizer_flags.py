"""`--sanitize`, `--replay-log` and `pagedkv replay`: reports, exit status, bad input."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedkv.cache import BlockManager, Misuse, SanitizerError
from pagedkv.cli.main import run
from pagedkv.engine.executor import ModelExecutor
from pagedkv.scheduling.step import Step, Ticket

pytestmark = pytest.mark.plants_faults
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def pagedkv(model: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line, `generate` on the tiny model: (exit status, stdout, stderr)."""

    def go(command: str, *args: str) -> tuple[int, str, str]:
        given = [command, *args]
        if command == "generate":
            given += ["--model", model, "--num-blocks", "64", "--max-tokens", "9", "--no-chat"]
        return run(given), *capsys.readouterr()

    return go


@pytest.fixture
def swapped_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """From step 2 on the executor takes the rows of its block tables in the wrong order."""
    submit = ModelExecutor.submit

    def swapped(self: ModelExecutor, step: Step) -> Ticket:
        rows = step.table_rows[::-1] if step.index >= 2 else step.table_rows
        return submit(self, dataclasses.replace(step, table_rows=rows))

    monkeypatch.setattr(ModelExecutor, "submit", swapped)


TWO = ("one", "two")


def one_line(err: str) -> str:
    assert err.startswith("pagedkv: ") and err.count("\n") == 1 and err.endswith("\n")
    return err


def test_the_text_is_the_same_and_the_sanitizer_is_on(
    pagedkv: Run, swapped_tables: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped = pagedkv("generate", *TWO)
    monkeypatch.undo()
    status, out, _ = plain = pagedkv("generate", *TWO)
    assert status == 0 and plain[1] != swapped[1]
    status, same, err = pagedkv("generate", *TWO, "--sanitize")
    assert (status, same) == (0, out) and "the sanitizer checks" in err


@pytest.mark.parametrize("through", ["flag", "variable"])
def test_a_report_is_shown_as_it_is(
    pagedkv: Run, swapped_tables: None, monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    flags = ["--sanitize"] if through == "flag" else []
    if through == "variable":
        monkeypatch.setenv("PAGEDKV_SANITIZE", "1")
    status, out, err = pagedkv("generate", *TWO, "--json", *flags)
    assert (status, out) == (1, "")
    lines = err.splitlines()
    assert lines[0].startswith(f"pagedkv: {Misuse.STALE_TABLE}: sequence ")
    assert any(line.startswith("  block ") for line in lines)
    assert any(line.startswith("    allocated in step 0, sequence ") for line in lines)
    assert any(line.startswith("  found in step 2, by check_reads, called from") for line in lines)
    assert "Traceback" not in err


def test_a_log_is_replayed_without_the_model(
    pagedkv: Run, swapped_tables: None, tmp_path: Path
) -> None:
    log = str(tmp_path / "a log")
    status, _, err = pagedkv("generate", *TWO, "--sanitize", "--replay-log", log, "--json")
    assert status == 1 and err.splitlines()[-1].endswith(f"pagedkv replay {log}")
    code = "import sys; sys.modules['torch'] = None; from pagedkv.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "replay", log], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert err.splitlines()[0].removeprefix("pagedkv: ") in done.stdout.splitlines()
    assert "another error" not in done.stdout


def test_a_log_of_a_run_without_an_error_says_so(pagedkv: Run, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    assert pagedkv("generate", *TWO, "--sanitize", "--replay-log", log)[0] == 0
    status, out, err = pagedkv("replay", log)
    assert (status, err) == (0, "") and out.startswith("no error was recorded")


def test_an_error_that_only_the_kv_shows_is_not_found_again(pagedkv: Run, tmp_path: Path) -> None:
    m = BlockManager(4, 2, sanitize=True)
    assert m.sanitizer is not None
    m.sanitizer.record(tmp_path / "log")
    m.open([1])
    with pytest.raises(SanitizerError):
        m.sanitizer.fail(Misuse.NAN, "planted")
    status, out, err = pagedkv("replay", str(tmp_path / "log"))
    assert (status, err) == (0, "")
    assert "1 calls lead to no error" in out and f"recorded was: {Misuse.NAN}: planted" in out


def test_a_log_without_the_sanitizer_is_refused(pagedkv: Run, tmp_path: Path) -> None:
    log = tmp_path / "log"
    status, out, err = pagedkv("generate", "a", "--replay-log", str(log))
    assert (status, out) == (2, "") and not log.exists()
    assert "--replay-log" in one_line(err) and "--sanitize" in err
    assert "replay_log" not in err and "True" not in err


def test_a_log_that_cannot_be_written_is_refused(pagedkv: Run, tmp_path: Path) -> None:
    log = tmp_path / "nowhere" / "log"
    status, out, err = pagedkv("generate", "a", "--sanitize", "--replay-log", str(log))
    assert (status, out) == (2, "")
    assert "cannot be written" in one_line(err) and str(log) in err and "--replay-log" in err


@pytest.mark.parametrize("value", ["yes", "2", " "])
def test_a_variable_that_is_neither_1_nor_0_is_refused(
    pagedkv: Run, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("PAGEDKV_SANITIZE", value)
    status, out, err = pagedkv("generate", "a")
    assert (status, out) == (2, "")
    assert one_line(err) == f"pagedkv: PAGEDKV_SANITIZE={value!r}: use 1 or 0\n"


@pytest.mark.parametrize("value", ["", "0"])
def test_a_variable_that_turns_it_off(
    pagedkv: Run, monkeypatch: pytest.MonkeyPatch, swapped_tables: None, value: str
) -> None:
    monkeypatch.setenv("PAGEDKV_SANITIZE", value)
    assert pagedkv("generate", *TWO)[0] == 0


def test_a_log_that_is_not_there_or_a_folder(pagedkv: Run, tmp_path: Path) -> None:
    for path in (tmp_path / "log", tmp_path):
        status, out, err = pagedkv("replay", str(path))
        assert (status, out) == (2, "")
        assert f"{path} cannot be read: " in one_line(err)
    status, out, err = pagedkv("replay")
    assert (status, out) == (2, "") and "FILE" in one_line(err)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "no log": lambda data: b"hello\n",
    "binary": lambda data: bytes(range(256)),
    "another version": lambda data: data.replace(b"replay log 1", b"replay log 0"),
    "cut off": lambda data: data[: len(data) // 2],
    "a line is missing": lambda data: b"\n".join(data.split(b"\n")[:1] + data.split(b"\n")[2:]),
    "snapshot": lambda data: data.replace(b'"snapshot": "', b'"snapshot": "AAAA'),
    "another call": lambda data: data.replace(b'"call": "open"', b'"call": "quit"'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_log_that_is_damaged(pagedkv: Run, tmp_path: Path, damage: str) -> None:
    log = tmp_path / "log"
    m = BlockManager(4, 2, sanitize=True)
    assert m.sanitizer is not None
    m.sanitizer.record(log)
    m.open([1])
    with pytest.raises(SanitizerError):
        m.sanitizer.check_idle()
    assert pagedkv("replay", str(log))[0] == 1
    before = log.read_bytes()
    log.write_bytes(DAMAGE[damage](before))
    assert log.read_bytes() != before
    status, out, err = pagedkv("replay", str(log))
    assert (status, out) == (2, "")
    assert str(log) in one_line(err)
