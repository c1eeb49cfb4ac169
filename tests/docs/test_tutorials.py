"""Every listing of every tutorial runs, as one program, with numpy alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from listings import ROOT, python_listings, run_without_torch

TUTORIALS = sorted(ROOT.glob("docs/tutorial/*.md"))


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_the_listings_run_without_torch(path: Path) -> None:
    listings = python_listings(path)
    assert listings
    run_without_torch(listings)


def test_there_is_a_tutorial() -> None:
    assert TUTORIALS
