"""The listings of the how-to pages run, each page as one program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "howto").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_listings_run(page: Path) -> None:
    listings = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert listings
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(listings)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_there_is_a_page() -> None:
    assert PAGES
