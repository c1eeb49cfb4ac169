"""What the README shows is what happens."""

from __future__ import annotations

import pytest
from listings import ROOT, python_listings, run, run_without_torch

README = ROOT / "README.md"


def test_the_library_listing_runs_without_torch() -> None:
    [listing] = python_listings(README, "The library")
    run_without_torch([listing, "assert manager.num_held_blocks == 0"])


def test_every_listing_is_python() -> None:
    listings = python_listings(README)
    assert len(listings) >= 2
    for listing in listings:
        compile(listing, README.name, "exec")


@pytest.mark.parity
def test_the_engine_listing_writes_text_with_the_embedded_model() -> None:
    [listing] = python_listings(README, "The engine")
    assert "Paris" in run(listing)
