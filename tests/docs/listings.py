"""The Python listings of a Markdown page, and running them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCKED = "import sys\nfor name in ('torch', 'transformers'): sys.modules[name] = None\n"


def python_listings(page: Path, section: str | None = None) -> list[str]:
    """Listings of the whole page, or of the part under the heading "## section"."""
    text = page.read_text()
    if section is not None:
        [text] = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.S | re.M)
    return re.findall(r"```python\n(.*?)```", text, re.S)


def run(program: str, folder: Path | None = None) -> str:
    """Runs a program in a process of its own, in `folder` if given; what it printed."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def run_without_torch(listings: list[str]) -> None:
    """Runs listings as one program, with numpy alone."""
    run(BLOCKED + "\n".join(listings))
