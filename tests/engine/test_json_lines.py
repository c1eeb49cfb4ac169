"""Files of one JSON object a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedkv.engine.json_lines import DECISIONS, LineWriter, read_lines
from pagedkv.errors import ConfigError


def test_lines_are_there_at_once_and_come_back(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "log", DECISIONS, "decision_log")
    writer.write('{"a":1}')
    assert list(read_lines(tmp_path / "log", DECISIONS)) == [(2, {"a": 1})]
    writer.close()
    writer.write('{"a":2}')
    assert list(read_lines(tmp_path / "log", "other", DECISIONS)) == [(2, {"a": 1})]


def test_a_last_line_that_was_cut_off_is_no_line(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "log", DECISIONS, "decision_log")
    writer.write('{"a":1}\n{"a"')
    writer.close()
    text = (tmp_path / "log").read_text()
    (tmp_path / "log").write_text(text.removesuffix("\n"))
    assert list(read_lines(tmp_path / "log", DECISIONS)) == [(2, {"a": 1})]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"{}\n", "line 1: no pagedkv decision log 1"),
        (b'{"format": "other"}\n', "line 1: .*'other'"),
        (b"hello\n", "line 1: no JSON"),
        (b"\xff\xfe\n", "line 1: no JSON"),
        (b'{"format": "pagedkv decision log 1"}\n{"a":1}\n{"a"\n', "line 3: no JSON"),
        (b'{"format": "pagedkv decision log 1"}\n[1]\n', r"line 2: \[1\] is no JSON object"),
        (b'{"format": "pagedkv decision log 1"}\n' + b"[" * 100_000 + b"\n", "line 2: no JSON"),
    ],
)
def test_what_is_no_such_file_is_refused_by_line(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        list(read_lines(path, DECISIONS))


def test_files_that_cannot_be_opened_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        list(read_lines(tmp_path / "missing", DECISIONS))
    with pytest.raises(ConfigError, match=r"decision_log=.*cannot be written"):
        LineWriter(tmp_path / "missing" / "log", DECISIONS, "decision_log")
    with pytest.raises(ConfigError, match=r"decision_log=.*cannot be written"):
        LineWriter("a\0b", DECISIONS, "decision_log")


def test_a_full_disk_ends_the_file_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    writer = LineWriter("/dev/full", DECISIONS, "decision_log")
    writer.write('{"a":1}')
    writer.close()
    assert "cannot be written any more" in caplog.text
