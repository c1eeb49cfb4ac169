"""The listings of the how-to pages run, each page as one program."""

from __future__ import annotations

from pathlib import Path

import pytest
from listings import ROOT, python_listings, run

PAGES = sorted(ROOT.glob("docs/howto/*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_listings_run(page: Path, tmp_path: Path) -> None:
    listings = python_listings(page)
    assert listings
    run("\n".join(listings), tmp_path)


def test_there_is_a_page() -> None:
    assert PAGES
