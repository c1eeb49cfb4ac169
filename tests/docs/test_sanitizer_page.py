"""The report that the page about the sanitizer shows is the one that its program prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from listings import ROOT, python_listings

from pagedkv.cli.main import run

pytestmark = pytest.mark.plants_faults
PAGE = ROOT / "docs/howto/find_a_wrong_block_table.md"


def test_the_report_is_the_one_shown_and_the_log_leads_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [listing] = python_listings(PAGE)
    program = tmp_path / "engine.py"
    program.write_text(listing + "import sys\n\nassert 'torch' not in sys.modules\n")
    done = subprocess.run(
        [sys.executable, program.name], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    [shown] = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.S)
    assert done.stdout.replace(f"{tmp_path}/", "") == shown
    assert run(["replay", str(tmp_path / "bug.log")]) == 1
    assert shown.splitlines()[1] in capsys.readouterr().out
