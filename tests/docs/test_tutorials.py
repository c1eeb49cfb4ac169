"""Every listing of every tutorial runs, as one program, with numpy alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TUTORIALS = sorted(DOCS.glob("tutorial/*.md"))
BLOCKED = "import sys\nfor name in ('torch', 'transformers'): sys.modules[name] = None\n"


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_the_listings_run_without_torch(path: Path) -> None:
    listings = re.findall(r"```python\n(.*?)```", path.read_text(), re.S)
    assert listings
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + "\n".join(listings)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_there_is_a_tutorial() -> None:
    assert TUTORIALS
